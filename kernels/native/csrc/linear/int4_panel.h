/* Rows of int8 times one panel of a weight in 4 bits. Groups of 32 inputs have a scale and an
 * offset for each output, and a scale for each row.
 *
 * A weight is code * scale + offset, of codes from 0 to 15. To an output, which begins with 0, each
 * group adds offset * (the row's scale * the sum of its codes), then (the sum of the products of
 * codes) * (scale * the row's scale); the bias comes last. Both times with one rounding of product
 * and sum together, and else each operation is rounded by itself: bits do not depend on a compiler.
 * The sum of products is an integer of 16 bits, and so exact.
 *
 * Of a group come the scales, [PANEL] bfloat16, and the offsets, then two steps at a time
 * [PANEL, 4] bytes: the lower halves are the codes of the first of them, the upper halves those of
 * the second.
 */
#ifndef TOPWORK_LINEAR_INT4_PANEL_H
#define TOPWORK_LINEAR_INT4_PANEL_H

#include "linear/quantized_panel.h"

enum {
    INT4_OFFSETS = PANEL * 2, /* where they begin, in bytes */
    INT4_CODES = INT4_OFFSETS + PANEL * 2,
    INT4_GROUP = INT4_CODES + PANEL * GROUP / 2,
    INT4_AHEAD = 12,  /* groups that are fetched before their use */
    INT4_VECTORS = 2, /* of a panel's outputs that a tile of many rows has at a time */
    INT4_FEW = 2,     /* rows that have room for all of them */
};

INLINE int64_t int4_panel_bytes(int64_t num_inputs) { return num_groups(num_inputs) * INT4_GROUP; }

/* Add the products of a group to sums that are zero. */
INLINE void add_int4_group(int num_rows, int num_vectors, const char *from, const int8_t *x,
                           int64_t row_size, u32v sums[][PANEL_VECTORS])
{
#if !HAS_BYTE_DOTS /* of all at once GCC would keep the products until it adds them up */
#pragma GCC unroll 1
#endif
    for (int pair = 0; pair < GROUP / (2 * QUAD); pair++, from += PANEL * QUAD, x += 2 * QUAD) {
        u32v lower[PANEL_VECTORS], upper[PANEL_VECTORS];
#pragma GCC unroll 4
        for (int i = 0; i < num_vectors; i++) {
            u32v codes = load_words(from + i * LANES * QUAD);
            lower[i] = codes & 0x0f0f0f0f;
            upper[i] = codes >> 4 & 0x0f0f0f0f;
        }
#pragma GCC unroll 6
        for (int row = 0; row < num_rows; row++) {
            u32v first = splat_bytes(x + row * row_size);
            u32v second = splat_bytes(x + row * row_size + QUAD);
#pragma GCC unroll 4
            for (int i = 0; i < num_vectors; i++) {
                sums[row][i] = add_small_quads(sums[row][i], lower[i], first);
                sums[row][i] = add_small_quads(sums[row][i], upper[i], second);
            }
        }
    }
}

/* Multiply with some vectors of the outputs, from vector `at` on. */
INLINE void multiply_int4_part(int num_rows, int num_vectors, const struct job *job, int at)
{
    f32v totals[INT4_TILE][PANEL_VECTORS] = {0};
    const char *from = job->weights;
    const int8_t *x = codes_of_row(job, 0);
    int64_t groups = num_groups(job->num_inputs);
    for (int64_t group = 0; group < groups; group++, from += INT4_GROUP, x += GROUP) {
        u32v sums[INT4_TILE][PANEL_VECTORS];
        if (at == 0)
            for (int i = 0; i < INT4_GROUP; i += LINE)
                prefetch(from, INT4_AHEAD * INT4_GROUP + i);
#pragma GCC unroll 6
        for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 4
            for (int i = 0; i < num_vectors; i++)
                sums[row][i] = (u32v){0};
        const char *codes = from + INT4_CODES + at * LANES * QUAD;
        add_int4_group(num_rows, num_vectors, codes, x, job->form.row_bytes, sums);
#pragma GCC unroll 4
        for (int i = 0; i < num_vectors; i++) {
            f32v scales = load_whole(from + (at + i) * LANES * 2, true);
            f32v offsets = load_whole(from + INT4_OFFSETS + (at + i) * LANES * 2, true);
#pragma GCC unroll 6
            for (int row = 0; row < num_rows; row++) {
                struct splat_group of_row = splat_group(job, row, group);
                f32v sum = words_to_floats(small_sums(sums[row][i]));
                f32v total = multiply_add(offsets, of_row.sum, totals[row][i]);
                totals[row][i] = multiply_add(sum, scales * of_row.scale, total);
            }
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 4
        for (int i = 0; i < num_vectors; i++) {
            int64_t first = (at + i) * LANES;
            store_outputs(job, row, first, totals[row][i] + load_f32(job->bias + first));
        }
}

INLINE void multiply_int4_tile(int num_rows, const struct job *job)
{
    if (num_rows <= INT4_FEW)
        multiply_int4_part(num_rows, PANEL_VECTORS, job, 0);
    else
        for (int at = 0; at < PANEL_VECTORS; at += INT4_VECTORS)
            multiply_int4_part(num_rows, INT4_VECTORS, job, at);
}

#endif
