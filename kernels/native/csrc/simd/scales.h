/* The scale of a row that becomes int8: its largest size / 127.
 *
 * Where the largest is below 2^-100 the scale is 0; where there is a NaN or an infinity it is NaN.
 */
#ifndef TOPWORK_SIMD_SCALES_H
#define TOPWORK_SIMD_SCALES_H

#include "simd/bytes.h"

/* What belongs to the codes of a row. */
struct scaled_row {
    float scale;
    int32_t shift; /* of sums of their products (simd/bytes.h) */
};

INLINE int32_t sum_of_words(i32v x)
{
    i32v other;
    FOLD_LANES(x, other, x + other);
    return x[0];
}

INLINE int32_t largest_word(i32v x)
{
    i32v other;
    FOLD_LANES(x, other, larger_words(x, other));
    return x[0];
}

/* Return the largest size of a row's numbers, as the bits of a float: those of a NaN are above an
 * infinity's, and these above all others'. */
INLINE int32_t largest_bits(const void *row, int64_t count, bool is_bf16)
{
    i32v largest = {0};
    for (int64_t i = 0; i < count; i += LANES)
        largest = larger_words(largest, (i32v)load_some(row, i, count - i, is_bf16) & 0x7fffffff);
    return largest_word(largest);
}

INLINE float float_of(int32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE float scale_of(int32_t largest)
{
    const int32_t infinity = 0x7f800000;
    if (largest >= infinity)
        return float_of(infinity | 0x400000);
    float size = float_of(largest);
    return size < 0x1p-100f ? 0.0f : size / (float)LARGEST_BYTE;
}

/* Return what numbers are multiplied by to become codes; 0 where there are none but 0. */
INLINE float inverse_of(float scale, int32_t largest)
{
    return scale > 0 ? (float)LARGEST_BYTE / float_of(largest) : 0;
}

#endif
