/* Rows in int8, each with a scale of its own: x is about scale * code, of codes from -127 to 127.
 *
 * The scale is the row's largest size / 127; a code is the float32 product x * (127 / largest),
 * rounded to the nearest, ties to even. A row whose largest is below 2^-100 has codes and a scale
 * of 0, one that holds a NaN or an infinity has the scale NaN. Every lane does the same operations,
 * each rounded by itself, so that a code is the same on all machines; `quantize_rows` in
 * kernels/int8.py is the same.
 */
#ifndef TOPWORK_LINEAR_INT8_ROWS_H
#define TOPWORK_LINEAR_INT8_ROWS_H

#include "simd/bytes.h"

/* What belongs to the codes of a row. */
struct row {
    float scale;
    int32_t start; /* what a sum of its products by `dot_quads` begins with */
};

/* A thread's own memory. */
struct coded_rows {
    int8_t *codes;     /* [rows of a block, row_bytes] */
    struct row *rows;  /* [rows of a block] */
    int64_t first_row; /* that is there; -1: none */
};

INLINE int64_t coded_row_bytes(int64_t num_inputs) { return round_up(num_inputs, LANES); }

INLINE int64_t coded_rows_bytes(int64_t num_rows, int64_t num_inputs)
{
    int64_t codes = round_up(num_rows * coded_row_bytes(num_inputs), 64);
    return codes + num_rows * (int64_t)sizeof(struct row);
}

INLINE struct coded_rows make_coded_rows(char *scratch, int64_t num_rows, int64_t num_inputs)
{
    int64_t codes = round_up(num_rows * coded_row_bytes(num_inputs), 64);
    return (struct coded_rows){(int8_t *)scratch, (struct row *)(scratch + codes), -1};
}

/* Return the largest size of a row's numbers, as the bits of a float: those of a NaN are above an
 * infinity's, and these above all others'. */
INLINE int32_t largest_bits(const char *from, int64_t num_inputs, bool is_bf16)
{
    i32v largest = {0};
    for (int64_t k = 0; k < num_inputs; k += LANES)
        largest =
            larger_words(largest, (i32v)load_some(from, k, num_inputs - k, is_bf16) & 0x7fffffff);
    i32v other;
    FOLD_LANES(largest, other, larger_words(largest, other));
    return largest[0];
}

INLINE float float_of(int32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Write the codes of a row whose largest size is given by its bits, and zeros behind them. */
INLINE struct row code_row(const char *from, int64_t num_inputs, bool is_bf16, int32_t largest,
                           int8_t *to)
{
    const int32_t infinity = 0x7f800000;
    float size = float_of(largest);
    if (largest >= infinity || size < 0x1p-100f) {
        memset(to, 0, (size_t)coded_row_bytes(num_inputs));
        return (struct row){largest >= infinity ? float_of(infinity | 0x400000) : 0.0f, 0};
    }
    float scale = size / (float)LARGEST_BYTE, inverse = (float)LARGEST_BYTE / size;
    i32v sum = {0};
    for (int64_t k = 0; k < num_inputs; k += LANES) {
        i32v codes = nearest_words(load_some(from, k, num_inputs - k, is_bf16) * inverse);
        i8v bytes = narrow_to_bytes(codes);
        memcpy(to + k, &bytes, sizeof bytes);
        sum += codes;
    }
    i32v other;
    FOLD_LANES(sum, other, sum + other);
    return (struct row){scale, (int32_t)(0u - DOT_SHIFT * (uint32_t)sum[0])};
}

#endif
