/* What is made of 1 / (1 + exp(-x)). */
#ifndef TOPWORK_SIMD_SIGMOID_H
#define TOPWORK_SIMD_SIGMOID_H

#include "simd/vector.h"

/* Return x / (1 + exp(-z)), with no exp of a positive number. */
INLINE f32v times_sigmoid(f32v x, f32v z)
{
    f32v e = exp_nonpositive((f32v)((u32v)z | 0x80000000)); /* of its size below zero */
    return x * select_lanes(z > 0.0f, splat(1.0f), e) / (e + 1.0f);
}

INLINE f32v silu(f32v x) { return times_sigmoid(x, x); }

/* Return x (1 + tanh(y)) / 2 = x / (1 + exp(-2y)), y = sqrt(2 / pi) (x + 0.044715 x^3). */
INLINE f32v gelu_tanh(f32v x)
{
    f32v cubed = x * x * x;
    return times_sigmoid(x, (x + cubed * 0.044715f) * 1.5957691216f);
}

/* Store the product of up and the activated gate, `width` numbers of either. */
INLINE void store_gated(const float *gate, const float *up, int64_t width, bool is_gelu, void *out,
                        bool is_bf16)
{
    for (int64_t i = 0; i < width; i += LANES) {
        f32v x = load_some(gate, i, width - i, false);
        store_some(out, i, width - i, is_bf16,
                   (is_gelu ? gelu_tanh(x) : silu(x)) * load_some(up, i, width - i, false));
    }
}

#endif
