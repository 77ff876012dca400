/* A panel of B in int8 times the A x of some rows, in tiles of AMX.
 *
 * Sums are those of panel_delta.h: integers. A panel is a tile's rows as it lies, and of any number
 * of lora_ranks: behind the last one of a row's codes are zeros, so that nothing comes of what lies
 * behind a panel. Tiles have the rows of a pass, whosever they are, so that none are told anew: a
 * run's B is multiplied by those of others, too, and what comes of that is not used.
 */
#ifndef TOPWORK_LORA_TILE_DELTA_H
#define TOPWORK_LORA_TILE_DELTA_H

#include "lora/panel_delta.h"
#include "simd/amx.h"

enum {
    B_LINE = PANEL_OUTPUTS * QUAD, /* bytes: two lines of tiles */
    B_PART = TILE_STEPS * B_LINE,  /* of a panel: two tiles */
    DELTA_PASS = 2 * TILE_ROWS,    /* rows */
    FEW_FOR_DELTA_TILES = 4,       /* rows of a run: tiles read more of B than these need */
    DELTA_SUMS = DELTA_PASS * B_LINE,
    DELTA_TILING = B_PART + DELTA_SUMS,
};

/* A thread's memory, and what its op has told its tiles. */
struct delta_tiling {
    char *memory; /* [DELTA_TILING]: a panel's part with zeros behind it, and sums */
    struct tile_rows *told;
};

/* Rows of a run in a pass, and a whole panel of B. */
struct delta_part {
    struct panel_task task;
    const char *end_of_b; /* of the module's last panel */
    int64_t first, end;   /* rows, counted from the pass's first */
    int64_t num_rows;     /* of the pass */
};

/* Return how many bytes tiles read of a panel and of what lies behind it. */
INLINE int64_t bytes_read_in_tiles(int64_t num_ranks)
{
    return round_up(num_ranks, TILE_LINE) * PANEL_OUTPUTS;
}

#if HAS_BYTE_TILES

/* Add the products of a run's rows, in the tiles that have some. */
INLINE void add_delta_products(bool has_first, bool has_second, const struct delta_part *part,
                               char *memory)
{
    int64_t stride = part->task.u_bytes;
    const char *first = part->task.u - part->first * stride, *second = first + TILE_ROWS * stride;
    const char *b = part->task.b;
    for (int64_t rank = 0; rank < part->task.num_ranks; rank += TILE_LINE, b += B_PART) {
        const char *part_of_b = readable(b, part->end_of_b - b, B_PART, memory, B_PART);
        _tile_loadd(6, part_of_b, B_LINE);
        _tile_loadd(7, part_of_b + TILE_LINE, B_LINE);
        if (has_first) {
            _tile_loadd(4, first + rank, stride);
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
        }
        if (has_second) {
            _tile_loadd(5, second + rank, stride);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }
}

static void multiply_delta_part(const struct delta_part *part, char *memory)
{
    if (part->end <= TILE_ROWS)
        add_delta_products(true, false, part, memory);
    else if (part->first >= TILE_ROWS)
        add_delta_products(false, true, part, memory);
    else
        add_delta_products(true, true, part, memory);
    for (int64_t at = 0; part->task.ahead != 0 && at < part->task.num_ranks * PANEL_OUTPUTS;
         at += LINE)
        prefetch((const void *)part->task.ahead, at);
}

/* Add what sums of rows of one run stand for to a whole panel of their outputs. */
static void add_delta_sums(const struct delta_part *part, const int32_t *sums)
{
    struct panel_task own = part->task; /* which the compiler knows that no store changes */
    sums += part->first * PANEL_OUTPUTS;
    for (int64_t i = 0, end = part->end - part->first; i < end; i++, sums += PANEL_OUTPUTS) {
        struct scaled_row scaled;
        memcpy(&scaled, own.scaled + i * own.u_bytes, sizeof scaled);
        for (int64_t at = 0; at < PANEL_OUTPUTS; at += LANES) {
            i32v total = (i32v)load_words(sums + at);
            f32v delta = as_rounded(words_to_floats(total) * scaled.scale);
            store_f32(own.y + i * own.ldy + at, add_to_output(&own, i, at, true, delta));
        }
    }
}

/* Add the delta of some rows to their outputs. */
static void add_in_tiles(const struct delta_part *part, const struct delta_tiling *tiling)
{
    int32_t *sums = (int32_t *)(tiling->memory + B_PART);
    int64_t num_first = smaller(part->num_rows, TILE_ROWS);
    shape_tiles(tiling->told, num_first, part->num_rows - num_first, TILE_LINE);
    settle_memory();
    zero_tiles();
    multiply_delta_part(part, tiling->memory);
    store_tiles(part->end > TILE_ROWS, sums, B_LINE);
    add_delta_sums(part, sums);
}

#else

INLINE void add_in_tiles(const struct delta_part *part, const struct delta_tiling *tiling)
{
    (void)part, (void)tiling;
    __builtin_unreachable(); /* there are none */
}

#endif
#endif
