/* Rows of int8 times one panel of a weight in 4 bits in tiles of AMX.
 *
 * The product of a group's codes is a tile of integers, for up to 16 rows and half of a panel; what
 * they add to outputs is done as in int4_panel.h, in its order, while the products of the next two
 * groups are made. Codes are brought into bytes once for all rows.
 */
#ifndef TOPWORK_LINEAR_INT4_TILES_H
#define TOPWORK_LINEAR_INT4_TILES_H

#include "linear/int4_panel.h"
#include "linear/int8_tiles.h"

enum {
    GROUP_STEPS_OF_TILE = GROUP / QUAD,               /* rows of a tile of weights */
    CODES_OF_GROUP = GROUP_STEPS_OF_TILE * TILE_LINE, /* bytes, of half a panel */
    SUMS_OF_GROUP = TILE_ROWS * LANES * (int)sizeof(int32_t),
    FEW_FOR_TILES = 12, /* rows for which bringing codes into bytes would be the work */
};

/* Return the bytes that a thread needs for the codes of half a panel and for sums of two groups. */
INLINE int64_t int4_tiling_bytes(int64_t num_inputs)
{
    return num_groups(num_inputs) * CODES_OF_GROUP + 2 * SUMS_OF_GROUP;
}

#if HAS_BYTE_TILES

/* Bring the codes of half a panel into bytes. */
static void widen_codes(const struct job *job, int half, char *to)
{
    const char *from = job->weights + INT4_CODES + half * TILE_LINE;
    for (int64_t left = num_groups(job->num_inputs); left > 0; left--, from += INT4_GROUP) {
        for (int i = 0; half == 0 && i < INT4_GROUP; i += LINE)
            prefetch(from, INT4_AHEAD * INT4_GROUP + i);
        for (int pair = 0; pair < GROUP / (2 * QUAD); pair++, to += 2 * TILE_LINE) {
            u32v codes = load_words(from + pair * PANEL * QUAD);
            store_words(to, codes & 0x0f0f0f0f);
            store_words(to + TILE_LINE, codes >> 4 & 0x0f0f0f0f);
        }
    }
    settle_memory();
}

/* Begin the products of a pair of groups, of which the second may not be there. */
INLINE void begin_pair(const struct job *job, const char *codes, int64_t group, int64_t groups)
{
    const int8_t *x = codes_of_row(job, 0) + group * GROUP;
    codes += group * CODES_OF_GROUP;
    _tile_zero(0);
    _tile_zero(1);
    if (group < groups) {
        _tile_loadd(4, x, job->form.row_bytes);
        _tile_loadd(6, codes, TILE_LINE);
        _tile_dpbsud(0, 4, 6);
    }
    if (group + 1 < groups) {
        _tile_loadd(4, x + GROUP, job->form.row_bytes);
        _tile_loadd(6, codes + CODES_OF_GROUP, TILE_LINE);
        _tile_dpbsud(1, 4, 6);
    }
}

INLINE void end_pair(char *sums)
{
    _tile_stored(0, sums, TILE_LINE);
    _tile_stored(1, sums + SUMS_OF_GROUP, TILE_LINE);
    settle_memory();
}

/* Add what the sums of a group stand for to rows' totals. */
INLINE void add_group(int num_rows, const struct job *job, int64_t group, const char *from,
                      const char *sums, f32v totals[TILE_ROWS])
{
    f32v scales = load_whole(from, true), offsets = load_whole(from + INT4_OFFSETS, true);
#pragma GCC unroll 16
    for (int row = 0; row < num_rows; row++) {
        struct splat_group of_row = splat_group(job, row, group);
        f32v sum = words_to_floats((i32v)load_words(sums + row * LANES * 4));
        f32v total = multiply_add(offsets, of_row.sum, totals[row]);
        totals[row] = multiply_add(sum, scales * of_row.scale, total);
    }
}

INLINE void multiply_half(int num_rows, const struct job *job, int half, const char *codes,
                          char *sums)
{
    f32v totals[TILE_ROWS];
    const char *from = job->weights + half * LANES * 2;
    int64_t groups = num_groups(job->num_inputs);
#pragma GCC unroll 16
    for (int row = 0; row < num_rows; row++)
        totals[row] = (f32v){0};
    settle_memory();
    begin_pair(job, codes, 0, groups);
    for (int64_t group = 0; group < groups; group += 2, from += 2 * INT4_GROUP) {
        end_pair(sums);
        begin_pair(job, codes, group + 2, groups);
        add_group(num_rows, job, group, from, sums, totals);
        if (group + 1 < groups)
            add_group(num_rows, job, group + 1, from + INT4_GROUP, sums + SUMS_OF_GROUP, totals);
    }
    int64_t first = half * LANES;
    f32v bias = load_f32(job->bias + first);
#pragma GCC unroll 16
    for (int row = 0; row < num_rows; row++)
        store_outputs(job, row, first, totals[row] + bias);
}

static __attribute__((noinline)) void multiply_int4_rows(const struct job *job, int half,
                                                         const char *codes, char *sums)
{
    switch (job->num_rows) {
#define ROWS(n) \
    case n: multiply_half(n, job, half, codes, sums); break;
        ROWS(8) /* of 17 rows in two passes; fewer never come */
        ROWS(9)
        ROWS(10)
        ROWS(11)
        ROWS(12)
        ROWS(13)
        ROWS(14)
        ROWS(15)
        ROWS(16)
#undef ROWS
    }
}

/* Do what a job tells, of any number of rows, in passes of a like size. */
static void multiply_int4_in_tiles(struct job job, struct byte_tiling *tiling)
{
    int64_t num_rows = job.num_rows, num_passes = round_up(num_rows, TILE_ROWS) / TILE_ROWS;
    char *sums = tiling->memory, *codes = sums + 2 * SUMS_OF_GROUP;
    const char *x = job.x;
    float *y = job.y;
    for (int half = 0; half < PANEL_VECTORS; half++) {
        int64_t left = num_rows;
        widen_codes(&job, half, codes);
        job.x = x;
        job.y = y;
        for (int64_t passes = num_passes; passes > 0; passes--, left -= job.num_rows) {
            job.num_rows = (left + passes - 1) / passes;
            shape_tiles(&tiling->rows, job.num_rows, 0, GROUP);
            multiply_int4_rows(&job, half, codes, sums);
            job.x += job.num_rows * job.form.row_bytes;
            job.y += job.num_rows * job.y_stride;
        }
    }
}

#else

INLINE void multiply_int4_in_tiles(struct job job, struct byte_tiling *tiling)
{
    (void)job, (void)tiling;
    __builtin_unreachable(); /* there are none */
}

#endif
#endif
