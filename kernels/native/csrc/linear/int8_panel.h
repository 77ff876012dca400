/* Rows of int8 times one panel of a weight in int8, whose outputs have a scale each.
 *
 * The sum of the products of a group's codes is shifted as the row says. An output is
 * float(sum over groups) * the row's scale * the output's + the bias.
 */
#ifndef TOPWORK_LINEAR_INT8_PANEL_H
#define TOPWORK_LINEAR_INT8_PANEL_H

#include "linear/quantized_panel.h"

enum {
    INT8_STEP = PANEL * QUAD, /* bytes */
    INT8_AHEAD = 16,          /* steps that are fetched before their use */
};

INLINE int64_t int8_panel_bytes(int64_t num_inputs)
{
    return round_up(num_inputs, QUAD) / QUAD * INT8_STEP;
}

/* Return what sums stand for. */
INLINE f32v int8_outputs(i32v sums, float row_scale, const float *scales, const float *bias)
{
    f32v y = as_rounded(words_to_floats(sums) * row_scale);
    return as_rounded(y * load_f32(scales)) + load_f32(bias);
}

/* Add the products of a group's codes, of `num_steps` steps, to the totals. */
INLINE void add_int8_group(int num_rows, const struct job *job, int64_t group, const char *from,
                           int64_t num_steps, i32v totals[][PANEL_VECTORS])
{
    const int8_t *x = codes_of_row(job, 0) + group * GROUP;
    i32v sums[INT8_TILE][PANEL_VECTORS], powers[INT8_TILE];
#pragma GCC unroll 6
    for (int row = 0; row < num_rows; row++) {
        struct shifted_group of_row = groups_of_row(job, row)[group].shifted;
        powers[row] = shift_factor(of_row.shift);
#pragma GCC unroll 4
        for (int i = 0; i < PANEL_VECTORS; i++)
            sums[row][i] = dot_start(totals[row][i], of_row.sum);
    }
    for (int64_t step = 0; step < num_steps; step++, from += INT8_STEP, x += QUAD) {
        u32v weights[PANEL_VECTORS];
        for (int i = 0; i < INT8_STEP; i += LINE)
            prefetch(from, INT8_AHEAD * INT8_STEP + i);
#pragma GCC unroll 4
        for (int i = 0; i < PANEL_VECTORS; i++)
            weights[i] = load_words(from + i * LANES * QUAD);
#pragma GCC unroll 6
        for (int row = 0; row < num_rows; row++) {
            struct quad inputs = splat_quad(x + row * job->form.row_bytes);
#pragma GCC unroll 4
            for (int i = 0; i < PANEL_VECTORS; i++)
                sums[row][i] = dot_quads(sums[row][i], inputs, weights[i], powers[row]);
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 4
        for (int i = 0; i < PANEL_VECTORS; i++)
            totals[row][i] = dot_end(totals[row][i], sums[row][i], powers[row]);
}

INLINE void multiply_int8_tile(int num_rows, const struct job *job)
{
    i32v sums[INT8_TILE][PANEL_VECTORS] = {0};
    const char *from = job->weights;
    int64_t whole = job->num_inputs / GROUP;
    for (int64_t group = 0; group < whole; group++, from += GROUP / QUAD * INT8_STEP)
        add_int8_group(num_rows, job, group, from, GROUP / QUAD, sums);
    if (job->num_inputs % GROUP) {
        int64_t num_steps = round_up(job->num_inputs % GROUP, QUAD) / QUAD;
        add_int8_group(num_rows, job, whole, from, num_steps, sums);
    }
#pragma GCC unroll 6
    for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 4
        for (int i = 0; i < PANEL_VECTORS; i++) {
            f32v y = int8_outputs(sums[row][i], scale_of_row(job, row), job->scales + i * LANES,
                                  job->bias + i * LANES);
            store_outputs(job, row, i * LANES, job->wants_sums ? (f32v)sums[row][i] : y);
        }
}

#endif
