/* Attention of a task's rows with a block of K and V in tiles of AMX.
 *
 * A tile product adds 32 elements to a sum: the first and second ones of all pairs apart, then
 * both. Every sum does the same whatever stands beside it. All of a block's V is added, so what a
 * row must not see needs a weight of zero and values that are numbers.
 */
#ifndef TOPWORK_ATTENTION_TILES_H
#define TOPWORK_ATTENTION_TILES_H

#include "attention/tile_softmax.h"

#if HAS_TILES

/* c [rows, columns] = or += a b, in tiles; `ld` are the words of rows. */
struct tile_product {
    float *c;
    const uint32_t *a, *b;
    int64_t ldc, lda, ldb;
    int64_t num_steps, num_columns; /* tiles */
};

/* Load or store the sums of one or two tiles of rows, and of one or two columns. */
#define MOVE_SUMS(move, c, ldc, has_second, has_pair)            \
    do {                                                         \
        move(0, c, (ldc) * 4);                                   \
        if (has_pair)                                            \
            move(1, (c) + LANES, (ldc) * 4);                     \
        if (has_second)                                          \
            move(2, (c) + TILE_ROWS * (ldc), (ldc) * 4);         \
        if ((has_second) && (has_pair))                          \
            move(3, (c) + TILE_ROWS * (ldc) + LANES, (ldc) * 4); \
    } while (0)

INLINE void multiply_columns(const struct tile_product *p, int64_t at, bool is_added,
                             bool has_second, bool has_pair)
{
    float *c = p->c + at * LANES;
    const uint32_t *a = p->a, *b = p->b + at * LANES;
    if (is_added) {
        MOVE_SUMS(_tile_loadd, c, p->ldc, has_second, has_pair);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t step = 0; step < p->num_steps; step++, a += LANES, b += TILE_STEPS * p->ldb) {
        _tile_loadd(6, b, p->ldb * 4);
        _tile_loadd(4, a, p->lda * 4);
        _tile_dpbf16ps(0, 4, 6);
        if (has_pair) {
            _tile_loadd(7, b + LANES, p->ldb * 4);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (has_second) {
            _tile_loadd(5, a + TILE_ROWS * p->lda, p->lda * 4);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (has_second && has_pair)
            _tile_dpbf16ps(3, 5, 7);
    }
    MOVE_SUMS(_tile_stored, c, p->ldc, has_second, has_pair);
}

INLINE void multiply_rows_in_tiles(const struct tile_product *p, bool is_added, bool has_second)
{
    settle_memory();
    for (int64_t at = 0; at < p->num_columns; at += 2)
        if (at + 1 < p->num_columns)
            multiply_columns(p, at, is_added, has_second, true);
        else
            multiply_columns(p, at, is_added, has_second, false);
    settle_memory();
}

static void score_in_tiles(const struct attention *op, const struct workspace *w, int64_t row,
                           int64_t num_rows, int64_t num_positions)
{
    int64_t depth = row_depth(op, OF_TILES);
    struct tile_product p = {
        .c = w->scores,
        .a = w->queries + row * depth,
        .b = w->keys,
        .ldc = BLOCK,
        .lda = depth,
        .ldb = BLOCK,
        .num_steps = depth / TILE_STEPS,
        .num_columns = round_up(num_positions, LANES) / LANES,
    };
    if (num_rows > TILE_ROWS)
        multiply_rows_in_tiles(&p, false, true);
    else
        multiply_rows_in_tiles(&p, false, false);
}

static void add_values_in_tiles(const struct attention *op, const struct workspace *w, int64_t row,
                                int64_t num_rows)
{
    int64_t width = row_width(op);
    struct tile_product p = {
        .c = w->sums + row * width,
        .a = w->weights,
        .b = w->values,
        .ldc = width,
        .lda = BLOCK,
        .ldb = width,
        .num_steps = BLOCK / TILE_INPUTS,
        .num_columns = width / LANES,
    };
    if (num_rows > TILE_ROWS)
        multiply_rows_in_tiles(&p, true, true);
    else
        multiply_rows_in_tiles(&p, true, false);
}

/* Make zeros of the values of positions from `count` on. */
static void hide_values(const struct attention *op, const struct workspace *w, int64_t count)
{
    int64_t width = row_width(op);
    uint32_t *values = w->values + count / 2 * width;
    if (count % 2 != 0) {
        for (int64_t d = 0; d < width; d += LANES)
            store_words(values + d, load_words(values + d) & 0xffff);
        values += width;
    }
    memset(values, 0, (size_t)(w->values + BLOCK / 2 * width - values) * sizeof *values);
}

/* Tell whether the values of positions from `first` on are numbers. */
static bool are_numbers(const struct attention *op, const struct workspace *w, int64_t first)
{
    int64_t width = row_width(op);
    const __m512i size = _mm512_set1_epi16(0x7fff), infinity = _mm512_set1_epi16(0x7f80);
    __m512i largest = _mm512_setzero_si512();
    for (int64_t at = first / 2 * width; at < BLOCK / 2 * width; at += LANES) {
        __m512i sizes = _mm512_and_si512((__m512i)load_words(w->values + at), size);
        largest = _mm512_max_epu16(largest, sizes);
    }
    return _mm512_cmpge_epu16_mask(largest, infinity) == 0;
}

/* Attend to the packed block with rows [first, stop) of the task, in passes of a like size. */
static void attend_in_passes(const struct attention *op, const struct workspace *w, int64_t first,
                             int64_t stop, int64_t start)
{
    int64_t num_passes = round_up(stop - first, TILED_ROWS) / TILED_ROWS;
    for (int64_t row = first, num_rows; row < stop; row += num_rows, num_passes--) {
        num_rows = (stop - row + num_passes - 1) / num_passes;
        int64_t first_tile = smaller(num_rows, TILE_ROWS);
        shape_tiles(w->told, first_tile, num_rows - first_tile, TILE_LINE);
        score_in_tiles(op, w, row, num_rows, num_visible(w, row + num_rows - 1, start));
        soften_pass(op, w, row, num_rows, start);
        add_values_in_tiles(op, w, row, num_rows);
    }
}

/* Attend in tiles to a packed block of `count` positions. Where a row must not see a value that is
 * no number, which would not vanish with a weight of zero, rows attend alone, from the last on, and
 * the values behind each are hidden. */
static void attend_in_tiles(const struct attention *op, const struct workspace *w, int64_t first,
                            int64_t stop, int64_t start, int64_t count)
{
    int64_t fewest = num_visible(w, first, start);
    hide_values(op, w, count);
    if (fewest == count || are_numbers(op, w, fewest)) {
        attend_in_passes(op, w, first, stop, start);
        return;
    }
    for (int64_t row = stop - 1; row >= first; row--) {
        hide_values(op, w, num_visible(w, row, start));
        attend_in_passes(op, w, row, row + 1, start);
    }
}

#else

INLINE void attend_in_tiles(const struct attention *op, const struct workspace *w, int64_t first,
                            int64_t stop, int64_t start, int64_t count)
{
    (void)op, (void)w, (void)first, (void)stop, (void)start, (void)count;
    __builtin_unreachable(); /* there are none */
}

#endif
#endif
