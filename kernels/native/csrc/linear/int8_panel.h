/* Rows of int8 times one panel of a weight in int8, whose outputs have a scale each.
 *
 * An output is float(sum of the products of codes) * the row's scale * the output's + the bias.
 */
#ifndef TOPWORK_LINEAR_INT8_PANEL_H
#define TOPWORK_LINEAR_INT8_PANEL_H

#include "linear/quantized_panel.h"

enum {
    INT8_STEP = PANEL * QUAD, /* bytes */
    INT8_AHEAD = 64,          /* steps that are fetched before their use */
};

INLINE int64_t int8_panel_bytes(int64_t num_inputs)
{
    return round_up(num_inputs, QUAD) / QUAD * INT8_STEP;
}

/* Return what sums stand for. */
INLINE f32v int8_outputs(i32v sums, float row_scale, f32v scales, f32v bias)
{
    f32v y = as_rounded(words_to_floats(sums) * row_scale);
    return as_rounded(y * scales) + bias;
}

INLINE void multiply_int8_tile(int num_rows, const struct job *job)
{
    i32v sums[INT8_TILE][PANEL_VECTORS];
    const int8_t *x = codes_of_row(job, 0);
    const char *from = job->weights;
#pragma GCC unroll 12
    for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 4
        for (int i = 0; i < PANEL_VECTORS; i++)
            sums[row][i] = dot_start(scaled_row(job, row).sum);
    int64_t num_steps = round_up(job->num_inputs, QUAD) / QUAD;
    for (int64_t step = 0; step < num_steps; step++, from += INT8_STEP, x += QUAD) {
        u32v weights[PANEL_VECTORS];
        for (int i = 0; i < INT8_STEP; i += LINE)
            prefetch(from, INT8_AHEAD * INT8_STEP + i);
#pragma GCC unroll 4
        for (int i = 0; i < PANEL_VECTORS; i++)
            weights[i] = load_words(from + i * LANES * QUAD);
#pragma GCC unroll 12
        for (int row = 0; row < num_rows; row++) {
            struct quad inputs = splat_quad(x + row * job->form.row_bytes);
#pragma GCC unroll 4
            for (int i = 0; i < PANEL_VECTORS; i++)
                sums[row][i] = dot_quads(sums[row][i], inputs, weights[i]);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 4
        for (int i = 0; i < PANEL_VECTORS; i++) {
            f32v scales = load_f32(job->scales + i * LANES), bias = load_f32(job->bias + i * LANES);
            f32v y = int8_outputs(sums[row][i], scaled_row(job, row).scale, scales, bias);
            store_outputs(job, row, i * LANES, job->wants_sums ? (f32v)sums[row][i] : y);
        }
}

#endif
