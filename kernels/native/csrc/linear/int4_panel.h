/* Rows of int8 times one panel of a weight in 4 bits, whose groups of 32 inputs have a scale for
 * each output.
 *
 * An output is (s_0 * scale_0 + s_1 * scale_1 + ...) * the row's scale + the bias, where s are the
 * sums of the products of a group's codes, which are integers. A scale has 8 bits, such a sum 15: a
 * product of both is exact in float32, so it is one whether a compiler fuses it into the sum or
 * not.
 *
 * Of a group come the scales, [PANEL] bfloat16, then two steps at a time [PANEL, 4] bytes: the
 * lower halves are the codes + 8 of the first of them, the upper halves those of the second.
 */
#ifndef TOPWORK_LINEAR_INT4_PANEL_H
#define TOPWORK_LINEAR_INT4_PANEL_H

#include "linear/quantized_panel.h"

enum {
    INT4_SCALES = PANEL * 2,                      /* bytes */
    INT4_GROUP = INT4_SCALES + PANEL * GROUP / 2, /* bytes */
    INT4_AHEAD = 4,                               /* groups that are fetched before their use */
    INT4_ZERO = 8,                                /* what stands for 0 */
};

INLINE int64_t int4_panel_bytes(int64_t num_inputs) { return num_groups(num_inputs) * INT4_GROUP; }

/* Add the products of a group to sums that are zero. */
INLINE void add_int4_group(int num_rows, const char *from, const int8_t *x, int64_t row_size,
                           u32v sums[][PANEL_VECTORS])
{
    for (int pair = 0; pair < GROUP / (2 * QUAD); pair++, from += PANEL * QUAD, x += 2 * QUAD) {
        u32v codes[PANEL_VECTORS];
#pragma GCC unroll 4
        for (int i = 0; i < PANEL_VECTORS; i++)
            codes[i] = load_words(from + i * LANES * QUAD);
#pragma GCC unroll 12
        for (int row = 0; row < num_rows; row++) {
            u32v first = splat_bytes(x + row * row_size);
            u32v second = splat_bytes(x + row * row_size + QUAD);
#pragma GCC unroll 4
            for (int i = 0; i < PANEL_VECTORS; i++) {
                sums[row][i] = add_small_quads(sums[row][i], codes[i] & 0x0f0f0f0f, first);
                sums[row][i] = add_small_quads(sums[row][i], codes[i] >> 4 & 0x0f0f0f0f, second);
            }
        }
    }
}

INLINE void multiply_int4_tile(int num_rows, const struct job *job)
{
    f32v totals[MAX_TILE][PANEL_VECTORS] = {0};
    const char *from = job->weights;
    const int8_t *x = job->x;
    int64_t groups = num_groups(job->num_inputs);
    for (int64_t group = 0; group < groups; group++, from += INT4_GROUP, x += GROUP) {
        u32v sums[MAX_TILE][PANEL_VECTORS];
        for (int i = 0; i < INT4_GROUP; i += LINE)
            prefetch(from, INT4_AHEAD * INT4_GROUP + i);
#pragma GCC unroll 12
        for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 4
            for (int i = 0; i < PANEL_VECTORS; i++)
                sums[row][i] = (u32v){0};
        add_int4_group(num_rows, from + INT4_SCALES, x, job->row_size, sums);
#pragma GCC unroll 4
        for (int i = 0; i < PANEL_VECTORS; i++) {
            f32v scales = load_whole(from + i * LANES * 2, true);
#pragma GCC unroll 12
            for (int row = 0; row < num_rows; row++) {
                int32_t shift = INT4_ZERO * job->group_sums[row * groups + group];
                f32v sum = words_to_floats(small_sums(sums[row][i]) - shift);
                totals[row][i] = multiply_add(sum, scales, totals[row][i]);
            }
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 4
        for (int i = 0; i < PANEL_VECTORS; i++)
            store_outputs(
                job, row, i * LANES,
                scaled(totals[row][i], splat(job->rows[row].scale), job->bias + i * LANES));
}

#endif
