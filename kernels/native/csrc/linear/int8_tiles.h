/* Rows of int8 times one panel of a weight in int8 in tiles of AMX.
 *
 * Sums are those of int8_panel.h: integers. A panel's steps are the rows of a tile as they lie. A
 * pass has the rows of two tiles.
 */
#ifndef TOPWORK_LINEAR_INT8_TILES_H
#define TOPWORK_LINEAR_INT8_TILES_H

#include "simd/amx.h"
#include "linear/int8_panel.h"

enum {
    BYTE_PART = TILE_STEPS * INT8_STEP, /* of a panel: two tiles */
    INT8_PASS = 2 * TILE_ROWS,          /* rows */
    BYTE_SUMS = INT8_PASS * PANEL * (int)sizeof(int32_t),
    BYTE_TILING = BYTE_PART + BYTE_SUMS,
    BYTE_AHEAD = 4, /* parts that are fetched before their use */
};

_Static_assert((int)PART_INPUTS == (int)TILE_LINE, "codes are whole lines of tiles");

/* A thread's own memory, and what it has told its tiles. */
struct byte_tiling {
    char *memory; /* [BYTE_TILING]: a panel's last part, with zeros behind it, and sums */
    struct tile_rows rows;
};

#if HAS_BYTE_TILES

/* Return where a part of a panel lies whole. */
INLINE const char *whole_part(const struct job *job, int64_t part, struct fetching *fetching,
                              char *to)
{
    int64_t num_bytes = int8_panel_bytes(job->num_inputs) - part * BYTE_PART;
    const char *from = job->weights + part * BYTE_PART;
    if (fetching != NULL)
        fetch_some(fetching);
    for (int i = 0; fetching == NULL && i < BYTE_PART; i += LINE)
        prefetch(from, BYTE_AHEAD * BYTE_PART + i);
    return readable(from, num_bytes, BYTE_PART, to, BYTE_PART);
}

/* Add the products of all inputs to sums that are zero. */
INLINE void add_parts(bool has_second, const struct job *job, struct fetching *fetching,
                      char *memory)
{
    int64_t row_size = job->form.row_bytes, count = job->form.code_bytes / TILE_LINE;
    const char *second = job->x + TILE_ROWS * row_size;
    _tile_zero(0);
    _tile_zero(1);
    if (has_second) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t part = 0; part < count; part++) {
        const char *weights = whole_part(job, part, fetching, memory);
        _tile_loadd(6, weights, INT8_STEP);
        _tile_loadd(7, weights + TILE_LINE, INT8_STEP);
        _tile_loadd(4, job->x + part * TILE_LINE, row_size);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        if (has_second) {
            _tile_loadd(5, second + part * TILE_LINE, row_size);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }
}

/* Store what sums stand for of a whole panel; or, unless `is_whole`, of the outputs that there are,
 * or themselves. */
INLINE void store_int8_rows(bool is_whole, const struct job *job, const int32_t *sums)
{
    struct job own = *job; /* which the compiler knows that no store changes */
    f32v scales[PANEL_VECTORS], bias[PANEL_VECTORS];
    for (int i = 0; i < PANEL_VECTORS; i++) {
        scales[i] = load_f32(own.scales + i * LANES);
        bias[i] = load_f32(own.bias + i * LANES);
    }
    for (int64_t row = 0; row < own.num_rows; row++) {
        float scale = scaled_row(&own, row).scale;
        for (int i = 0; i < PANEL_VECTORS; i++) {
            i32v total = (i32v)load_words(sums + row * PANEL + i * LANES);
            f32v y = int8_outputs(total, scale, scales[i], bias[i]);
            if (is_whole)
                store_f32(own.y + row * own.y_stride + i * LANES, y);
            else
                store_outputs(&own, row, i * LANES, own.wants_sums ? (f32v)total : y);
        }
    }
}

INLINE void store_int8_sums(const struct job *job, const int32_t *sums)
{
    if (job->wants_sums || job->num_outputs < PANEL)
        store_int8_rows(false, job, sums);
    else
        store_int8_rows(true, job, sums);
}

INLINE void multiply_in_pass(bool has_second, const struct job *job, struct fetching *fetching,
                             char *memory)
{
    int32_t *sums = (int32_t *)(memory + BYTE_PART);
    settle_memory();
    add_parts(has_second, job, fetching, memory);
    store_tiles(has_second, sums, PANEL * 4);
    store_int8_sums(job, sums);
}

/* Multiply up to INT8_PASS rows by a panel; without `fetching` they are the first. */
static __attribute__((noinline)) void multiply_int8_pass(const struct job *job,
                                                         struct fetching *fetching,
                                                         struct byte_tiling *tiling)
{
    int64_t first = smaller(job->num_rows, TILE_ROWS);
    shape_tiles(&tiling->rows, first, job->num_rows - first, TILE_LINE);
    if (job->num_rows > first)
        multiply_in_pass(true, job, fetching, tiling->memory);
    else
        multiply_in_pass(false, job, fetching, tiling->memory);
}

#else

INLINE void multiply_int8_pass(const struct job *job, struct fetching *fetching,
                               struct byte_tiling *tiling)
{
    (void)job, (void)fetching, (void)tiling;
    __builtin_unreachable(); /* there are none */
}

#endif
#endif
