/* Rows in int8: x is about scale * code, of codes from -127 to 127, or a smaller scale in groups of
 * inputs whose numbers are small.
 *
 * A row's scale is its largest size / 127; a code is the float32 product x * (127 / largest),
 * rounded to the nearest, ties to even. Where the largest is below 2^-100, codes and scale are 0;
 * where there is a NaN or an infinity, the scale is NaN. For a weight in int8 a group has an
 * exponent, the most halvings of the scale with which no code is above 127, up to the linear's
 * largest: integers still stand for all of a row, once they are shifted. (Shared microexponents,
 * arXiv 2302.08007.) For one in 4 bits each group has a scale as if it were a row. Every lane does
 * the same operations, each rounded by itself, so that a code is the same on all machines;
 * kernels/quantized.py has the same.
 */
#ifndef TOPWORK_LINEAR_QUANTIZED_ROWS_H
#define TOPWORK_LINEAR_QUANTIZED_ROWS_H

#include "simd/scales.h"

enum { GROUP = 32 }; /* inputs */

/* What belongs to the codes of a group where the weight is in int8. */
struct shifted_group {
    int32_t shift; /* of what is summed: the linear's largest exponent less the group's */
    int32_t sum;   /* of the codes; where there are dot products */
};

/* The same where it is in 4 bits. */
struct scaled_group {
    float scale;
    float sum; /* of the codes, times the scale */
};

union group {
    struct shifted_group shifted;
    struct scaled_group scaled;
};

/* A thread's own memory. */
struct coded_rows {
    int8_t *codes;       /* [rows of a block, row_bytes] */
    float *scales;       /* [rows of a block]; of int8 */
    union group *groups; /* [rows of a block, groups] */
    int64_t first_row;   /* that is there; -1: none */
};

INLINE int64_t num_groups(int64_t num_inputs) { return round_up(num_inputs, GROUP) / GROUP; }

INLINE int64_t coded_row_bytes(int64_t num_inputs) { return round_up(num_inputs, GROUP); }

INLINE int64_t coded_rows_bytes(int64_t num_rows, int64_t num_inputs)
{
    int64_t groups = num_groups(num_inputs) * (int64_t)sizeof(union group);
    return num_rows * (coded_row_bytes(num_inputs) + groups + (int64_t)sizeof(float));
}

INLINE struct coded_rows make_coded_rows(char *scratch, int64_t num_rows, int64_t num_inputs)
{
    union group *groups = (union group *)(scratch + num_rows * coded_row_bytes(num_inputs));
    float *scales = (float *)(groups + num_rows * num_groups(num_inputs));
    return (struct coded_rows){(int8_t *)scratch, scales, groups, -1};
}

/* Load LANES of a row's numbers, zeros behind its end. */
INLINE f32v load_inputs(const char *row, int64_t first, int64_t num_inputs, bool is_bf16)
{
    return first < num_inputs ? load_some(row, first, num_inputs - first, is_bf16) : (f32v){0};
}

INLINE int32_t sum_of_words(i32v x)
{
    i32v other;
    FOLD_LANES(x, other, x + other);
    return x[0];
}

/* Return what `largest_bits` has for a row whose inputs ranks share, of what each has found in its
 * own. */
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

enum { GROUP_VECTORS = GROUP / LANES };

/* Load a group's numbers and return the bits of their largest size. */
INLINE int32_t load_group(const char *from, int64_t first, int64_t num_inputs, bool is_bf16,
                          f32v x[GROUP_VECTORS])
{
    i32v largest = {0};
    for (int i = 0; i < GROUP_VECTORS; i++) {
        x[i] = load_inputs(from, first + i * LANES, num_inputs, is_bf16);
        largest = larger_words(largest, (i32v)x[i] & 0x7fffffff);
    }
    return largest_word(largest);
}

/* Write the codes of a group and return their sums by lanes. */
INLINE i32v code_group(const f32v x[GROUP_VECTORS], float inverse, int8_t *to)
{
    i32v sum = {0};
    for (int i = 0; i < GROUP_VECTORS; i++) {
        i32v codes = nearest_words(x[i] * inverse);
        i8v bytes = narrow_to_bytes(codes);
        memcpy(to + i * LANES, &bytes, sizeof bytes);
        sum += codes;
    }
    return sum;
}

/* Write the codes of a row whose largest size is given by its bits, and return the scale of what is
 * summed. */
INLINE float code_row(const char *from, int64_t num_inputs, bool is_bf16, int32_t largest,
                      int64_t max_exponent, int8_t *to, union group *groups)
{
    float scale = scale_of(largest), size = float_of(largest);
    float inverse = (float)LARGEST_BYTE / size;
    if (!(scale > 0)) {
        memset(to, 0, (size_t)coded_row_bytes(num_inputs));
        memset(groups, 0, (size_t)num_groups(num_inputs) * sizeof *groups);
        return scale;
    }
    for (int64_t first = 0; first < num_inputs; first += GROUP, to += GROUP, groups++) {
        f32v x[GROUP_VECTORS];
        float own = float_of(load_group(from, first, num_inputs, is_bf16, x));
        int32_t exponent = 0;
        while (exponent < max_exponent && own * (float)(2 << exponent) <= size)
            exponent++;
        i32v sums = code_group(x, inverse * (float)(1 << exponent), to);
        int32_t sum = HAS_BYTE_DOTS ? sum_of_words(sums) : 0; /* nothing else asks for it */
        groups->shifted = (struct shifted_group){(int32_t)max_exponent - exponent, sum};
    }
    return scale / (float)(1 << max_exponent);
}

/* Write the codes of a row's groups, each with a scale of its own. */
INLINE void code_groups(const char *from, int64_t num_inputs, bool is_bf16, int8_t *to,
                        union group *groups)
{
    for (int64_t first = 0; first < num_inputs; first += GROUP, to += GROUP, groups++) {
        f32v x[GROUP_VECTORS];
        int32_t largest = load_group(from, first, num_inputs, is_bf16, x);
        float scale = scale_of(largest);
        if (!(scale > 0)) {
            memset(to, 0, GROUP);
            groups->scaled = (struct scaled_group){scale, scale};
            continue;
        }
        int32_t sum = sum_of_words(code_group(x, (float)LARGEST_BYTE / float_of(largest), to));
        groups->scaled = (struct scaled_group){scale, scale * (float)sum};
    }
}

#endif
