/* Rows of int8 times one panel of a weight in int8: 32 outputs, four inputs at a time.
 *
 * An output is float(sum of codes' products) * the row's scale * the output's, each product rounded
 * by itself, then plus the bias. The sums are exact, so neither the tile nor the machine is in the
 * bits.
 */
#ifndef TOPWORK_LINEAR_INT8_PANEL_H
#define TOPWORK_LINEAR_INT8_PANEL_H

#include "linear/blocks.h"
#include "linear/int8_rows.h"

enum {
    PANEL_VECTORS = PANEL / LANES,   /* of a step */
    STEP_BYTES = PANEL * QUAD,       /* of a panel: 4 inputs */
    MAX_TILE = LANES == 16 ? 12 : 2, /* rows whose sums stay in registers */
    AHEAD = 16,                      /* steps of a panel that are fetched before their use */
};

/* What a panel does to some rows. */
struct job {
    const int8_t *x;        /* [rows, row_size] */
    const struct row *rows; /* [rows] */
    const char *weights;    /* [steps, STEP_BYTES] */
    const float *scales;    /* [PANEL] */
    const float *bias;      /* [PANEL] */
    float *y;               /* [rows, y_stride] */
    int64_t num_rows, row_size, y_stride, num_steps, num_outputs;
};

/* Store what sums stand for to LANES outputs of a row, from `first` on. */
INLINE void store_outputs(const struct job *job, int64_t row, int64_t first, i32v sums)
{
    f32v y = as_rounded(words_to_floats(sums) * job->rows[row].scale);
    y = as_rounded(y * load_f32(job->scales + first)) + load_f32(job->bias + first);
    if (first < job->num_outputs)
        store_some(job->y + row * job->y_stride, first, job->num_outputs - first, false, y);
}

INLINE void multiply_tile(int num_rows, const struct job *job)
{
    i32v sums[MAX_TILE][PANEL_VECTORS];
#pragma GCC unroll 12
    for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 4
        for (int i = 0; i < PANEL_VECTORS; i++)
            sums[row][i] = job->rows[row].start - (i32v){0};
    const int8_t *x = job->x;
    for (int64_t k = 0; k < job->num_steps; k++, x += QUAD) {
        const char *from = job->weights + k * STEP_BYTES;
        u32v weights[PANEL_VECTORS];
        for (int i = 0; i < STEP_BYTES; i += LINE)
            prefetch(from, AHEAD * STEP_BYTES + i);
#pragma GCC unroll 4
        for (int i = 0; i < PANEL_VECTORS; i++)
            weights[i] = load_words(from + i * LANES * QUAD);
#pragma GCC unroll 12
        for (int row = 0; row < num_rows; row++) {
            struct quad inputs = splat_quad(x + row * job->row_size);
#pragma GCC unroll 4
            for (int i = 0; i < PANEL_VECTORS; i++)
                sums[row][i] = dot_quads(sums[row][i], inputs, weights[i]);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 4
        for (int i = 0; i < PANEL_VECTORS; i++)
            store_outputs(job, row, i * LANES, sums[row][i]);
}

/* Multiply at most MAX_TILE rows. */
INLINE void multiply_rows(const struct job *job)
{
#define ROWS(n) \
    case n: multiply_tile(n, job); break;
    switch (job->num_rows) {
        ROWS(1)
        ROWS(2)
#if LANES == 16
        ROWS(3)
        ROWS(4)
        ROWS(5)
        ROWS(6)
        ROWS(7)
        ROWS(8)
        ROWS(9)
        ROWS(10)
        ROWS(11)
        ROWS(12)
#endif
    }
#undef ROWS
}

#endif
