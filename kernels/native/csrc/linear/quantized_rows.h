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

enum {
    TILE_INPUTS_INT8 = 64, /* of a line of a tile */
    PLANE_BITS = 7,        /* of a shifted code that the first plane has */
};

/* Where a row's parts lie. Codes that are multiplied in tiles are shifted first: their lower bits
 * are one plane, the others, with the sign, a second one. */
struct coded_form {
    int64_t plane_bytes, num_planes;
    int64_t groups_at, scale_at; /* bytes before them */
    int64_t row_bytes;
};

INLINE int64_t num_groups(int64_t num_inputs) { return round_up(num_inputs, GROUP) / GROUP; }

INLINE struct coded_form coded_form(int64_t num_inputs, int64_t max_exponent, bool is_tiled)
{
    struct coded_form form = {
        .plane_bytes = round_up(num_inputs, is_tiled ? TILE_INPUTS_INT8 : GROUP),
        .num_planes = is_tiled && max_exponent > 0 ? 2 : 1,
    };
    form.groups_at = form.num_planes * form.plane_bytes;
    int64_t groups = is_tiled ? 0 : num_groups(num_inputs);
    form.scale_at = form.groups_at + groups * (int64_t)sizeof(union group);
    form.row_bytes = round_up(form.scale_at + (int64_t)sizeof(float), LINE);
    return form;
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

/* Return the codes of some numbers. */
INLINE i32v codes_of(f32v x, float inverse) { return nearest_words(x * inverse); }

INLINE void store_bytes(int8_t *to, i32v words)
{
    i8v bytes = narrow_to_bytes(words);
    memcpy(to, &bytes, sizeof bytes);
}

/* Write the codes of a group and return their sums by lanes. */
INLINE i32v code_group(const f32v x[GROUP_VECTORS], float inverse, int8_t *to)
{
    i32v sum = {0};
    for (int i = 0; i < GROUP_VECTORS; i++) {
        i32v codes = codes_of(x[i], inverse);
        store_bytes(to + i * LANES, codes);
        sum += codes;
    }
    return sum;
}

/* Write the codes of a group, shifted, to the planes of a row. */
INLINE void code_planes(const f32v x[GROUP_VECTORS], float inverse, int32_t shift,
                        const struct coded_form *form, int8_t *to)
{
    for (int i = 0; i < GROUP_VECTORS; i++, to += LANES) {
        i32v codes = (i32v)((u32v)codes_of(x[i], inverse) << (uint32_t)shift);
        if (form->num_planes == 1) {
            store_bytes(to, codes);
            continue;
        }
        store_bytes(to, codes & ((1 << PLANE_BITS) - 1));
        store_bytes(to + form->plane_bytes, codes >> PLANE_BITS);
    }
}

enum { MOST_HALVINGS = 3 };

/* Return how often a size fits, doubled, into another, up to the most that a linear may ask for:
 * without a branch, which would be taken at random. */
INLINE int32_t num_halvings(float own, float size)
{
    int32_t count = 0;
    for (int i = 1; i <= MOST_HALVINGS; i++)
        count += own * (float)(1 << i) <= size;
    return count;
}

/* Write the codes of a row whose largest size is given by its bits, and return the scale of what is
 * summed. */
INLINE float code_row(const char *from, int64_t num_inputs, bool is_bf16, int32_t largest,
                      int64_t max_exponent, bool is_tiled, const struct coded_form *form, char *to)
{
    int8_t *codes = (int8_t *)to;
    union group *groups = (union group *)(to + form->groups_at);
    float scale = scale_of(largest), size = float_of(largest);
    float inverse = (float)LARGEST_BYTE / size;
    if (!(scale > 0)) {
        memset(to, 0, (size_t)form->scale_at);
        return scale;
    }
    for (int64_t first = 0; first < num_inputs; first += GROUP, codes += GROUP, groups++) {
        f32v x[GROUP_VECTORS];
        float own = float_of(load_group(from, first, num_inputs, is_bf16, x));
        int32_t exponent = (int32_t)smaller(num_halvings(own, size), max_exponent);
        float of_group = inverse * (float)(1 << exponent);
        int32_t shift = (int32_t)max_exponent - exponent;
        if (is_tiled) {
            code_planes(x, of_group, shift, form, codes);
            continue;
        }
        i32v sums = code_group(x, of_group, codes);
        int32_t sum = HAS_BYTE_DOTS ? sum_of_words(sums) : 0; /* nothing else asks for it */
        groups->shifted = (struct shifted_group){shift, sum};
    }
    if (is_tiled && num_groups(num_inputs) * GROUP < form->plane_bytes)
        for (int64_t plane = 0; plane < form->num_planes; plane++)
            memset(codes + plane * form->plane_bytes, 0, GROUP);
    return scale / (float)(1 << max_exponent);
}

/* Write the codes of a row's groups, each with a scale of its own. */
INLINE void code_groups(const char *from, int64_t num_inputs, bool is_bf16,
                        const struct coded_form *form, char *to)
{
    int8_t *codes = (int8_t *)to;
    union group *groups = (union group *)(to + form->groups_at);
    for (int64_t first = 0; first < num_inputs; first += GROUP, codes += GROUP, groups++) {
        f32v x[GROUP_VECTORS];
        int32_t largest = load_group(from, first, num_inputs, is_bf16, x);
        float scale = scale_of(largest);
        if (!(scale > 0)) {
            memset(codes, 0, GROUP);
            groups->scaled = (struct scaled_group){scale, scale};
            continue;
        }
        int32_t sum = sum_of_words(code_group(x, (float)LARGEST_BYTE / float_of(largest), codes));
        groups->scaled = (struct scaled_group){scale, scale * (float)sum};
    }
}

#endif
