/* Rows of K and V in int8, as pages keep them: a code for each feature, and then their scale in
 * bfloat16.
 *
 * The scale is the row's largest size / 127, rounded to bfloat16; a code is the float32 product
 * x * (1 / scale), rounded to the nearest, ties to even: with such a scale none is above 127. A row
 * of numbers below 2^-100 is zeros; one with a NaN or an infinity is NaN. So what is kept depends
 * on the row alone. kernels/int8_kv.py has the same.
 */
#ifndef TOPWORK_ATTENTION_INT8_ROWS_H
#define TOPWORK_ATTENTION_INT8_ROWS_H

#include "simd/scales.h"

enum { SCALE_BYTES = 2 };

INLINE void store_int8_row(const float *x, int64_t head_dim, char *to)
{
    f32v scale = round_floats(splat(scale_of(largest_bits(x, head_dim, false))));
    uint32_t bits = ((u32v)scale)[0] >> 16;
    uint16_t kept = (uint16_t)bits;
    memcpy(to + head_dim, &kept, sizeof kept);
    if (!(scale[0] > 0)) {
        memset(to, 0, (size_t)head_dim);
        return;
    }
    float inverse = 1.0f / scale[0];
    for (int64_t i = 0; i < head_dim; i += LANES) {
        i8v codes = narrow_to_bytes(nearest_words(load_some(x, i, head_dim - i, false) * inverse));
        memcpy(to + i, &codes, (size_t)smaller(LANES, head_dim - i));
    }
}

/* Write what a row stands for, in float32 or rounded to bfloat16. */
INLINE void widen_int8_row(const char *from, int64_t head_dim, void *to, bool is_bf16)
{
    uint16_t kept;
    memcpy(&kept, from + head_dim, sizeof kept);
    float scale = float_of((int32_t)((uint32_t)kept << 16));
    for (int64_t i = 0; i < head_dim; i += LANES) {
        i8v codes = {0};
        if (head_dim - i >= LANES)
            memcpy(&codes, from + i, sizeof codes);
        else
            memcpy(&codes, from + i, (size_t)(head_dim - i));
        f32v x = words_to_floats(widen_bytes(codes)) * scale;
        store_some(to, i, head_dim - i, is_bf16, x);
    }
}

#endif
