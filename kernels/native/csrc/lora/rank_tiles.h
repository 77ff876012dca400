/* Rows of int8 times a pair of panels of A in tiles of AMX; sums are those of rank_panel.h. */
#ifndef TOPWORK_LORA_RANK_TILES_H
#define TOPWORK_LORA_RANK_TILES_H

#include "lora/rank_panel.h"
#include "simd/amx.h"

enum {
    RANK_PASS = 2 * TILE_ROWS,                     /* rows */
    FEW_FOR_RANK_TILES = 2,                        /* of a run, which wait for memory */
    RANK_PART = TILE_STEPS * TILE_LINE,            /* bytes of a panel: a tile */
    RANK_SUMS = PAIR_RANKS * (int)sizeof(int32_t), /* bytes of a row's */
    /* Of a thread: the last parts of a pair of panels with zeros behind them, and sums. */
    RANK_TILING = PANELS_OF_PAIR * RANK_PART + RANK_PASS * RANK_SUMS,
};

_Static_assert((int)RANK_PANEL *QUAD == (int)TILE_LINE, "a panel is a tile wide");
_Static_assert((int)INT8_BLOCK_ROWS == (int)RANK_PASS, "a task's rows are a pass");

#if HAS_BYTE_TILES

/* Return where a part of a panel can be read as a tile: of a narrower one each line is read with
 * some of what lies behind it. */
INLINE const char *readable_part(const char *from, const char *end, int64_t line, char *copy)
{
    int64_t num_read = (TILE_STEPS - 1) * line + TILE_LINE;
    return readable(from, end - from, num_read, copy, RANK_PART);
}

/* Add the products of all inputs to sums that are zero. */
INLINE void add_rank_parts(bool has_second, const struct pair_task *t, char *memory)
{
    int64_t row_bytes = t->form.row_bytes, num_parts = t->form.code_bytes / TILE_LINE;
    int64_t lines[PANELS_OF_PAIR] = {QUAD * ranks_of_panel(t->pair, 0),
                                     QUAD * ranks_of_panel(t->pair, 1)};
    const char *a[PANELS_OF_PAIR] = {t->pair.a, panel_of_pair(t->pair, 1, t->num_inputs)};
    const char *x = t->x, *second = t->x + TILE_ROWS * row_bytes;
    for (int64_t part = 0; part < num_parts; part++, x += TILE_LINE, second += TILE_LINE) {
        fetch_part(t, part);
        _tile_loadd(4, x, row_bytes);
        if (has_second)
            _tile_loadd(5, second, row_bytes);
        _tile_loadd(6, readable_part(a[0], t->end_of_a, lines[0], memory), lines[0]);
        _tile_dpbssd(0, 4, 6);
        if (has_second)
            _tile_dpbssd(2, 5, 6);
        a[0] += TILE_STEPS * lines[0];
        if (lines[1] == 0)
            continue;
        _tile_loadd(7, readable_part(a[1], t->end_of_a, lines[1], memory + RANK_PART), lines[1]);
        _tile_dpbssd(1, 4, 7);
        if (has_second)
            _tile_dpbssd(3, 5, 7);
        a[1] += TILE_STEPS * lines[1];
    }
}

/* Do a pair of panels for up to RANK_PASS rows. */
static void multiply_pair_in_tiles(const struct pair_task *t, struct tile_rows *told, char *memory)
{
    int64_t first = smaller(t->num_rows, TILE_ROWS);
    int32_t *sums = (int32_t *)(memory + PANELS_OF_PAIR * RANK_PART);
    shape_tiles(told, first, t->num_rows - first, TILE_LINE);
    settle_memory();
    zero_tiles();
    if (t->num_rows > first)
        add_rank_parts(true, t, memory);
    else
        add_rank_parts(false, t, memory);
    store_tiles(t->num_rows > first, sums, RANK_SUMS);
    struct pair_task own = *t; /* which the compiler knows that no store changes */
    for (int64_t row = 0; row < own.num_rows; row++, sums += PAIR_RANKS)
        for (int64_t rank = 0; rank < own.pair.num_ranks; rank += LANES)
            store_inner(&own, row, rank, (i32v)load_words(sums + rank));
}

#else

INLINE void multiply_pair_in_tiles(const struct pair_task *t, struct tile_rows *told, char *memory)
{
    (void)t, (void)told, (void)memory;
    __builtin_unreachable(); /* there are none */
}

#endif
#endif
