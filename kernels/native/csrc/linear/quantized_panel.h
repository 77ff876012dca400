/* What products of quantized rows with one panel of a quantized weight have in common.
 *
 * A panel is 32 outputs, read four inputs at a time. Sums of products of codes are integers, and so
 * exact; what floats they become is done in one order, each operation rounded by itself. So neither
 * the tile nor the machine is in the bits.
 */
#ifndef TOPWORK_LINEAR_QUANTIZED_PANEL_H
#define TOPWORK_LINEAR_QUANTIZED_PANEL_H

#include <stddef.h>

#include "linear/blocks.h"
#include "linear/quantized_rows.h"

enum {
    /* Rows of a tile: as many as have their sums in registers, in int8 for all vectors, in int4 for
     * two, for what is done to weights first is done once for all rows. Without dot products others
     * are needed beside them. */
    INT8_TILE = LANES == 8 ? 2
    : HAS_BYTE_DOTS        ? 12
                           : 6,
    INT4_TILE = LANES == 8 ? 4 : 6,
    MAX_TILE = INT8_TILE > INT4_TILE ? INT8_TILE : INT4_TILE,
};

/* What belongs to the codes of a row's group, in every lane. */
struct splat_group {
    f32v scale, sum;
};

/* What a panel does to some rows. */
struct job {
    const char *x; /* [rows, form's] */
    struct coded_form form;
    const char *weights; /* a panel of the format */
    const float *scales; /* [PANEL]; of int8 */
    const float *bias;   /* [PANEL] */
    float *y;            /* [rows, y_stride]; or int32 sums, if these are wanted */
    bool wants_sums;     /* of int8 */
    bool is_fetched;     /* what lies ahead of what is multiplied */
    int64_t num_rows, y_stride, num_inputs, num_outputs;
};

INLINE const int8_t *codes_of_row(const struct job *job, int64_t row)
{
    return (const int8_t *)(job->x + row * job->form.row_bytes);
}

INLINE const char *behind_codes(const struct job *job, int64_t row)
{
    return job->x + row * job->form.row_bytes + job->form.code_bytes;
}

/* Return what belongs to a row's codes; of int8. */
INLINE struct scaled_row scaled_row(const struct job *job, int64_t row)
{
    struct scaled_row scaled;
    memcpy(&scaled, behind_codes(job, row), sizeof scaled);
    return scaled;
}

/* Return what belongs to the codes of a row's group; of int4. Each number is loaded by itself, into
 * all lanes: a struct would come by an integer's register. */
INLINE struct splat_group splat_group(const struct job *job, int64_t row, int64_t group)
{
    const char *from = behind_codes(job, row) + group * (int64_t)sizeof(struct scaled_group);
    return (struct splat_group){splat_f32(from + offsetof(struct scaled_group, scale)),
                                splat_f32(from + offsetof(struct scaled_group, sum))};
}

/* Store LANES outputs of a row, from `first` on. */
INLINE void store_outputs(const struct job *job, int64_t row, int64_t first, f32v y)
{
    if (first < job->num_outputs)
        store_some(job->y + row * job->y_stride, first, job->num_outputs - first, false, y);
}

/* The cases of a switch by the number of rows: `tile` is made for each. */
#define TILE_CASE(n, tile, job) \
    case n: tile(n, job); break;
#define TWO_CASES(tile, job) TILE_CASE(1, tile, job) TILE_CASE(2, tile, job)
#define FOUR_CASES(tile, job) \
    TWO_CASES(tile, job)      \
    TILE_CASE(3, tile, job)   \
    TILE_CASE(4, tile, job)
#define SIX_CASES(tile, job) \
    FOUR_CASES(tile, job)    \
    TILE_CASE(5, tile, job)  \
    TILE_CASE(6, tile, job)
#define TWELVE_CASES(tile, job) \
    SIX_CASES(tile, job)        \
    TILE_CASE(7, tile, job)     \
    TILE_CASE(8, tile, job)     \
    TILE_CASE(9, tile, job)     \
    TILE_CASE(10, tile, job)    \
    TILE_CASE(11, tile, job)    \
    TILE_CASE(12, tile, job)

#endif
