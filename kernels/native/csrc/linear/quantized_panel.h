/* What products of quantized rows with one panel of a quantized weight have in common.
 *
 * A panel is 32 outputs, read four inputs at a time. Sums of products of codes are integers, and so
 * exact; what floats they become is done in one order, each operation rounded by itself. So neither
 * the tile nor the machine is in the bits.
 */
#ifndef TOPWORK_LINEAR_QUANTIZED_PANEL_H
#define TOPWORK_LINEAR_QUANTIZED_PANEL_H

#include "linear/blocks.h"
#include "linear/quantized_rows.h"

enum {
    PANEL_VECTORS = PANEL / LANES,  /* of a step, which is four inputs */
    MAX_TILE = LANES == 16 ? 6 : 2, /* rows whose sums and totals stay in registers */
};

/* What a panel does to some rows. */
struct job {
    const int8_t *x;           /* [rows, row_size] */
    const float *row_scales;   /* [rows]; of int8 */
    const union group *groups; /* [rows, groups] */
    const char *weights;       /* a panel of the format */
    const float *scales;       /* [PANEL]; of int8 */
    const float *bias;         /* [PANEL] */
    float *y;                  /* [rows, y_stride]; or int32 sums, if these are wanted */
    bool wants_sums;           /* of int8 */
    int64_t num_rows, row_size, y_stride, num_inputs, num_outputs;
};

/* Store LANES outputs of a row, from `first` on. */
INLINE void store_outputs(const struct job *job, int64_t row, int64_t first, f32v y)
{
    if (first < job->num_outputs)
        store_some(job->y + row * job->y_stride, first, job->num_outputs - first, false, y);
}

/* The cases of a switch by the number of rows, at most MAX_TILE: `tile` is made for each. */
#define TILE_CASE(n, tile, job) \
    case n: tile(n, job); break;
#if LANES == 16
#define TILE_CASES(tile, job) \
    TILE_CASE(1, tile, job)   \
    TILE_CASE(2, tile, job)   \
    TILE_CASE(3, tile, job)   \
    TILE_CASE(4, tile, job)   \
    TILE_CASE(5, tile, job)   \
    TILE_CASE(6, tile, job)
#else
#define TILE_CASES(tile, job) \
    TILE_CASE(1, tile, job)   \
    TILE_CASE(2, tile, job)
#endif

#endif
