/* Rows in int8, each with a scale of its own: x is about scale * code, of codes from -127 to 127.
 *
 * The scale is the row's largest size / 127; a code is the float32 product x * (127 / largest),
 * rounded to the nearest, ties to even. A row whose largest is below 2^-100 has codes and a scale
 * of 0, one that holds a NaN or an infinity has the scale NaN. Every lane does the same operations,
 * each rounded by itself, so that a code is the same on all machines; `quantize_rows` in
 * kernels/quantized.py is the same.
 */
#ifndef TOPWORK_LINEAR_QUANTIZED_ROWS_H
#define TOPWORK_LINEAR_QUANTIZED_ROWS_H

#include "simd/bytes.h"

enum { GROUP = 32 }; /* inputs: those of a weight in 4 bits that share a scale */

/* What belongs to the codes of a row. */
struct row {
    float scale;
    int32_t sum; /* of the codes */
};

/* A thread's own memory. */
struct coded_rows {
    int8_t *codes;       /* [rows of a block, row_bytes] */
    struct row *rows;    /* [rows of a block] */
    int32_t *group_sums; /* [rows of a block, groups]: of the codes in each */
    int64_t first_row;   /* that is there; -1: none */
};

INLINE int64_t num_groups(int64_t num_inputs) { return round_up(num_inputs, GROUP) / GROUP; }

INLINE int64_t coded_row_bytes(int64_t num_inputs) { return round_up(num_inputs, GROUP); }

INLINE int64_t coded_rows_bytes(int64_t num_rows, int64_t num_inputs)
{
    int64_t sums = num_groups(num_inputs) * (int64_t)sizeof(int32_t);
    return num_rows * (coded_row_bytes(num_inputs) + (int64_t)sizeof(struct row) + sums);
}

INLINE struct coded_rows make_coded_rows(char *scratch, int64_t num_rows, int64_t num_inputs)
{
    struct row *rows = (struct row *)(scratch + num_rows * coded_row_bytes(num_inputs));
    return (struct coded_rows){(int8_t *)scratch, rows, (int32_t *)(rows + num_rows), -1};
}

/* Load LANES of a row's numbers, zeros behind its end. */
INLINE f32v load_inputs(const char *row, int64_t first, int64_t num_inputs, bool is_bf16)
{
    return first < num_inputs ? load_some(row, first, num_inputs - first, is_bf16) : (f32v){0};
}

/* Return the largest size of a row's numbers, as the bits of a float: those of a NaN are above an
 * infinity's, and these above all others'. */
INLINE int32_t largest_bits(const char *from, int64_t num_inputs, bool is_bf16)
{
    i32v largest = {0};
    for (int64_t k = 0; k < num_inputs; k += LANES)
        largest =
            larger_words(largest, (i32v)load_inputs(from, k, num_inputs, is_bf16) & 0x7fffffff);
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

/* Return the same of a row whose inputs ranks share, of what each has found in its own. */
INLINE int32_t largest_of_ranks(const float *sizes, int64_t num_ranks)
{
    int32_t largest = 0;
    for (int64_t rank = 0; rank < num_ranks; rank++) {
        int32_t bits;
        memcpy(&bits, sizes + rank, sizeof bits);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* Return the scale of a row. */
INLINE float scale_of(int32_t largest)
{
    const int32_t infinity = 0x7f800000;
    if (largest >= infinity)
        return float_of(infinity | 0x400000);
    float size = float_of(largest);
    return size < 0x1p-100f ? 0.0f : size / (float)LARGEST_BYTE;
}

/* Write the codes of a row whose largest size is given by its bits, and the sums of their groups.
 */
INLINE struct row code_row(const char *from, int64_t num_inputs, bool is_bf16, int32_t largest,
                           int8_t *to, int32_t *group_sums)
{
    float scale = scale_of(largest), inverse = (float)LARGEST_BYTE / float_of(largest);
    if (!(scale > 0)) {
        memset(to, 0, (size_t)coded_row_bytes(num_inputs));
        memset(group_sums, 0, (size_t)num_groups(num_inputs) * sizeof(int32_t));
        return (struct row){scale, 0};
    }
    int32_t total = 0;
    for (int64_t group = 0; group < num_groups(num_inputs); group++) {
        i32v sum = {0}, other;
        for (int64_t k = group * GROUP; k < (group + 1) * GROUP; k += LANES) {
            i32v codes = nearest_words(load_inputs(from, k, num_inputs, is_bf16) * inverse);
            i8v bytes = narrow_to_bytes(codes);
            memcpy(to + k, &bytes, sizeof bytes);
            sum += codes;
        }
        FOLD_LANES(sum, other, sum + other);
        group_sums[group] = sum[0];
        total += sum[0];
    }
    return (struct row){scale, total};
}

#endif
