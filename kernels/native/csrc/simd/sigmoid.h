/* What is made of 1 / (1 + exp(-x)). */
#ifndef TOPWORK_SIMD_SIGMOID_H
#define TOPWORK_SIMD_SIGMOID_H

#include "simd/vector.h"

/* Return x / (1 + exp(-z)), with no exp of a positive number. */
INLINE f32v times_sigmoid(f32v x, f32v z)
{
    f32v e = exp_nonpositive(select_lanes(z > 0.0f, -z, z));
    return x * select_lanes(z > 0.0f, splat(1.0f), e) / (e + 1.0f);
}

INLINE f32v silu(f32v x) { return times_sigmoid(x, x); }

#endif
