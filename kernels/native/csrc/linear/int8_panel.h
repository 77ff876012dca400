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

/* Add the products of one or two times four inputs, from quad `at` on. */
INLINE void add_int8_quads(int num_rows, int count, const struct job *job, int64_t at,
                           i32v sums[][PANEL_VECTORS])
{
    const char *from = job->weights + at * INT8_STEP;
    const int8_t *x = codes_of_row(job, 0) + at * QUAD * INPUT_BYTES;
    u32v weights[2][PANEL_VECTORS];
    for (int i = 0; job->is_fetched && i < count * INT8_STEP; i += LINE)
        prefetch(from, INT8_AHEAD * INT8_STEP + i);
#pragma GCC unroll 8
    for (int i = 0; i < count * PANEL_VECTORS; i++)
        weights[i / PANEL_VECTORS][i % PANEL_VECTORS] = load_words(from + i * LANES * QUAD);
#pragma GCC unroll 12
    for (int row = 0; row < num_rows; row++, x += job->form.row_bytes) {
        struct quad inputs[2] = {splat_quad(x), splat_quad(x + (count - 1) * QUAD * INPUT_BYTES)};
#pragma GCC unroll 4
        for (int i = 0; i < PANEL_VECTORS; i++)
            sums[row][i] = count == 1
                               ? dot_quads(sums[row][i], inputs[0], weights[0][i])
                               : dot_two_quads(sums[row][i], inputs, weights[0][i], weights[1][i]);
    }
}

/* Tell whether any row of a tile is crowded in a part. */
INLINE bool is_part_crowded(int num_rows, const struct job *job, int64_t part)
{
    bool is_any = false;
#pragma GCC unroll 12
    for (int row = 0; row < num_rows; row++)
        is_any |= crowded_parts(job->x + row * job->form.row_bytes, &job->form)[part];
    return is_any;
}

INLINE void multiply_int8_tile(int num_rows, const struct job *job)
{
    i32v sums[INT8_TILE][PANEL_VECTORS];
#pragma GCC unroll 12
    for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 4
        for (int i = 0; i < PANEL_VECTORS; i++)
            sums[row][i] = dot_start(scaled_row(job, row).shift);
    int64_t num_quads = round_up(job->num_inputs, QUAD) / QUAD, quad = 0;
    for (int64_t part = 0; !HAS_BYTE_DOTS && quad < num_quads; part++) {
        int64_t end = smaller(quad + PART_INPUTS / QUAD, num_quads);
        if (!is_part_crowded(num_rows, job, part))
            for (; quad + 2 <= end; quad += 2)
                add_int8_quads(num_rows, 2, job, quad, sums);
        for (; quad < end; quad++)
            add_int8_quads(num_rows, 1, job, quad, sums);
    }
    for (; quad < num_quads; quad++)
        add_int8_quads(num_rows, 1, job, quad, sums);
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
