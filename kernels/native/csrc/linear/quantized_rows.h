/* Rows in int8: x is about scale * code, of codes from -127 to 127.
 *
 * For a weight in int8 a row has one scale, its largest size / 127; a code is the float32 product
 * x * (127 / largest), rounded to the nearest, ties to even. Where the largest is below 2^-100,
 * codes and scale are 0; where there is a NaN or an infinity, the scale is NaN. So that a few large
 * numbers do not take the bits of all others, whole groups of 32 inputs are rotated first, in rows
 * as in weights: multiplied by the Hadamard matrix / sqrt(32), which leaves their products what
 * they were (QuaRot, arXiv 2404.00456). For a weight in 4 bits each group has a scale as if it were
 * a row. Every lane does the same operations, each rounded by itself, so that a code is the same on
 * all machines; kernels/quantized.py has the same.
 */
#ifndef TOPWORK_LINEAR_QUANTIZED_ROWS_H
#define TOPWORK_LINEAR_QUANTIZED_ROWS_H

#include "simd/scales.h"

enum {
    GROUP = 32, /* inputs */
    GROUP_VECTORS = GROUP / LANES,
    PART_INPUTS = 64, /* of a row for a weight in int8: a line of a tile */
};

/* What belongs to the codes of a group where the weight is in 4 bits. */
struct scaled_group {
    float scale;
    float sum; /* of the codes, times the scale */
};

/* Where a row's parts lie: codes, then a scaled_row or a scaled_group for each group. For a weight
 * in int8 codes lie as `store_byte_inputs` stores them, zeros up to a whole part behind the last,
 * and without dot products a bool of each part comes last: whether it is crowded. */
struct coded_form {
    int64_t code_bytes, row_bytes;
};

INLINE int64_t num_groups(int64_t num_inputs) { return round_up(num_inputs, GROUP) / GROUP; }

INLINE struct coded_form form_of_inputs(int64_t num_inputs, bool is_int8, int64_t input_bytes)
{
    int64_t code_bytes = round_up(num_inputs, is_int8 ? PART_INPUTS : GROUP), scaled;
    if (is_int8) {
        int64_t num_parts = code_bytes / PART_INPUTS;
        scaled = (int64_t)sizeof(struct scaled_row) + (input_bytes == 1 ? 0 : num_parts);
        code_bytes *= input_bytes;
    } else
        scaled = num_groups(num_inputs) * (int64_t)sizeof(struct scaled_group);
    return (struct coded_form){code_bytes, round_up(code_bytes + scaled, LINE)};
}

INLINE struct coded_form coded_form(int64_t num_inputs, bool is_int8)
{
    return form_of_inputs(num_inputs, is_int8, INPUT_BYTES);
}

/* Return the memory that a row is given: as much on all CPUs, so that it can be told before a rank
 * starts somewhere (deploy/memory/cpu_steps.py). */
INLINE int64_t memory_of_coded_row(int64_t num_inputs, bool is_int8)
{
    return form_of_inputs(num_inputs, is_int8, MOST_INPUT_BYTES).row_bytes;
}

/* Return where a row says of each part of its codes whether it is crowded. */
INLINE bool *crowded_parts(const char *row, const struct coded_form *form)
{
    return (bool *)row + form->code_bytes + sizeof(struct scaled_row);
}

/* A row that is to become int8. */
struct plain_row {
    const char *from;
    int64_t num_inputs;
    bool is_bf16, is_rotated;
};

/* Return what `load_row` has for a row whose inputs ranks share, of what each has found in its
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

/* Return -1 in lanes whose number has this bit, 1 in others. */
INLINE f32v signs_by(int32_t bit)
{
    return select_lanes((lane_numbers() & bit) != 0, splat(-1.0f), splat(1.0f));
}

/* Multiply a group by the Hadamard matrix / sqrt(32), pairs that are 16 apart first. */
INLINE void rotate_group(f32v x[GROUP_VECTORS])
{
    for (int apart = GROUP_VECTORS / 2; apart > 0; apart /= 2)
        for (int i = 0; i < GROUP_VECTORS; i++)
            if (!(i & apart)) {
                f32v a = x[i], b = x[i + apart];
                x[i] = a + b;
                x[i + apart] = a - b;
            }
    for (int i = 0; i < GROUP_VECTORS; i++) {
        f32v other;
        int32_t apart = LANES; /* halved each time that the fold asks */
        FOLD_LANES(x[i], other, multiply_add(x[i], signs_by(apart /= 2), other));
        x[i] *= 0x1.6a09e6p-3f;
    }
}

INLINE i32v larger_sizes(i32v largest, const f32v x[GROUP_VECTORS])
{
    for (int i = 0; i < GROUP_VECTORS; i++)
        largest = larger_words(largest, (i32v)x[i] & 0x7fffffff);
    return largest;
}

/* Load a group's numbers as they are, zeros behind the row's end. */
INLINE void load_group(const struct plain_row *row, int64_t first, f32v x[GROUP_VECTORS])
{
    for (int i = 0; i < GROUP_VECTORS; i++) {
        int64_t at = first + i * LANES, left = row->num_inputs - at;
        x[i] = left > 0 ? load_some(row->from, at, left, row->is_bf16) : (f32v){0};
    }
}

INLINE void store_group(float *to, const f32v x[GROUP_VECTORS])
{
    for (int i = 0; i < GROUP_VECTORS; i++)
        store_f32(to + i * LANES, x[i]);
}

/* Store the numbers of a row's whole groups and return the bits of each lane's largest size. */
INLINE i32v load_whole_groups(const struct plain_row *row, bool is_bf16, bool is_rotated, float *to)
{
    i32v largest = {0};
    for (int64_t first = 0; first + GROUP <= row->num_inputs; first += GROUP, to += GROUP) {
        f32v x[GROUP_VECTORS];
        for (int i = 0; i < GROUP_VECTORS; i++)
            x[i] = load_whole(row->from + (first + i * LANES) * (is_bf16 ? 2 : 4), is_bf16);
        if (is_rotated)
            rotate_group(x);
        largest = larger_sizes(largest, x);
        store_group(to, x);
    }
    return largest;
}

/* Store a row's numbers in whole groups and return the bits of the largest size. */
INLINE int32_t load_row(const struct plain_row *row, float *to)
{
    i32v largest;
    int64_t whole = row->num_inputs / GROUP * GROUP;
    if (row->is_bf16)
        largest = row->is_rotated ? load_whole_groups(row, true, true, to)
                                  : load_whole_groups(row, true, false, to);
    else
        largest = row->is_rotated ? load_whole_groups(row, false, true, to)
                                  : load_whole_groups(row, false, false, to);
    if (whole < row->num_inputs) {
        f32v x[GROUP_VECTORS];
        load_group(row, whole, x);
        largest = larger_sizes(largest, x);
        store_group(to + whole, x);
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

/* Write a row of what `load_row` has stored, whose largest size is given by its bits. */
INLINE void code_row(const float *x, int32_t largest, int64_t num_inputs,
                     const struct coded_form *form, char *to)
{
    struct scaled_row scaled = {.scale = scale_of(largest)};
    float inverse = (float)LARGEST_BYTE / float_of(largest);
    i32v shifts = {0};
    int64_t num_codes = scaled.scale > 0 ? num_groups(num_inputs) * GROUP : 0;
    for (int64_t i = 0; i < num_codes; i += LANES) {
        i32v codes = nearest_words(load_f32(x + i) * inverse);
        store_byte_inputs((int8_t *)to + i * INPUT_BYTES, narrow_to_bytes(codes));
        shifts += shifts_of(codes);
    }
    int64_t end = num_codes * INPUT_BYTES;
    memset(to + end, 0, (size_t)(form->code_bytes - end));
    scaled.shift = sum_of_words(shifts);
    memcpy(to + form->code_bytes, &scaled, sizeof scaled);
    if (!HAS_BYTE_DOTS)
        for (int64_t i = 0; i * PART_INPUTS < num_inputs; i++)
            crowded_parts(to, form)[i] =
                is_crowded((int8_t *)to + i * PART_INPUTS * INPUT_BYTES, PART_INPUTS);
}

/* Write the codes of a row's groups, each with a scale of its own. */
INLINE void code_groups(const struct plain_row *row, const struct coded_form *form, char *to)
{
    int8_t *codes = (int8_t *)to;
    struct scaled_group *groups = (struct scaled_group *)(to + form->code_bytes);
    for (int64_t first = 0; first < row->num_inputs; first += GROUP, codes += GROUP, groups++) {
        f32v x[GROUP_VECTORS];
        load_group(row, first, x);
        int32_t largest = largest_word(larger_sizes((i32v){0}, x));
        float scale = scale_of(largest);
        if (!(scale > 0)) {
            memset(codes, 0, GROUP);
            *groups = (struct scaled_group){scale, scale};
            continue;
        }
        int32_t sum = sum_of_words(code_group(x, (float)LARGEST_BYTE / float_of(largest), codes));
        *groups = (struct scaled_group){scale, scale * (float)sum};
    }
}

#endif
