/* The online softmax of rows whose scores and weights are of tiles.
 *
 * The maxima of all rows of a pass are found first, then all their weights: one row alone would
 * wait for its largest score, and for its weights at its end. A row's own operations and their
 * order do not depend on the rows beside it. They are those of `soften`, but a score is scaled, and
 * less the maximum, in one operation, which rounds once, and the maximum follows scores late.
 */
#ifndef TOPWORK_ATTENTION_TILE_SOFTMAX_H
#define TOPWORK_ATTENTION_TILE_SOFTMAX_H

#include "attention/online_softmax.h"

#if HAS_TILES

enum {
    BLOCK_VECTORS = BLOCK / LANES,
    /* How far scores to base 2 may be above a row's maximum before this follows and what has been
     * summed is rescaled: weights are up to 256 then. The idea is FlashAttention-4's. */
    KEPT_GROWTH = 8,
};

/* The rows of a pass. */
struct softened {
    int64_t row, num_rows;     /* the first of them */
    uint64_t seen[TILED_ROWS]; /* the positions of the block, from the lowest bit on */
    float maxima[TILED_ROWS];  /* what is taken off their scores */
};

/* Return the positions of a block, which begins at `start`, that a row sees: bits. */
INLINE uint64_t seen_positions(const struct attention *op, const struct workspace *w, int64_t row,
                               int64_t start)
{
    int64_t last = w->positions[row] - start;
    int64_t first = op->window > 0 && last + 1 > op->window ? last + 1 - op->window : 0;
    uint64_t seen = last >= BLOCK - 1 ? ~0ull : (2ull << last) - 1;
    return first >= BLOCK ? 0 : seen & ~0ull << first;
}

/* Return the largest lane of each of four vectors. */
INLINE __m128 largest_of_four(const f32v x[4])
{
    f32v pairs[2];
    for (int i = 0; i < 2; i++) {
        f32v a = x[2 * i], b = x[2 * i + 1];
        pairs[i] =
            larger(SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                   SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
    }
    f32v a = pairs[0], b = pairs[1];
    f32v all = larger(SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                      SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
    all = larger(SHUFFLE(all, all, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13), all);
    all = larger(SHUFFLE(all, all, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14), all);
    all = SHUFFLE(all, all, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    return _mm512_castps512_ps128((__m512)all);
}

/* Return the larger ones of a row's scores that it sees; none is NaN. */
INLINE f32v larger_scores(const float *from, uint64_t seen, bool is_whole)
{
    f32v tops = splat(-INFINITY);
#pragma GCC unroll 4
    for (int i = 0; i < BLOCK_VECTORS; i++) {
        f32v x = load_f32(from + i * LANES);
        if (!is_whole)
            x = (f32v)_mm512_mask_mov_ps((__m512)splat(-INFINITY), (__mmask16)(seen >> i * LANES),
                                         (__m512)x);
        tops = larger(x, tops);
    }
    return tops;
}

/* Find the largest scores of rows, four at a time, and scale them. */
INLINE void find_largest(const struct workspace *w, struct softened *rows, float scale,
                         bool is_whole)
{
    for (int64_t i = 0; i < rows->num_rows; i += 4) {
        f32v tops[4];
#pragma GCC unroll 4
        for (int64_t j = 0; j < 4; j++) {
            int64_t at = smaller(i + j, rows->num_rows - 1);
            tops[j] = larger_scores(w->scores + at * BLOCK, rows->seen[at], is_whole);
        }
        _mm_storeu_ps(rows->maxima + i, _mm_mul_ps(largest_of_four(tops), _mm_set1_ps(scale)));
    }
}

/* Let the maxima of rows be what they were, or where that is far below what has been found, this,
 * and bring what has been summed there to it. */
INLINE void grow_maxima(const struct attention *op, const struct workspace *w,
                        struct softened *rows)
{
    for (int64_t i = 0; i < rows->num_rows; i += LANES) {
        __mmask16 all = (__mmask16)((1u << smaller(rows->num_rows - i, LANES)) - 1);
        f32v before = (f32v)_mm512_maskz_loadu_ps(all, w->maxima + rows->row + i);
        f32v found = load_f32(rows->maxima + i), most = before + (float)KEPT_GROWTH;
        unsigned grown = _mm512_mask_cmp_ps_mask(all, (__m512)found, (__m512)most, _CMP_GT_OQ);
        store_f32(rows->maxima + i,
                  (f32v)_mm512_mask_mov_ps((__m512)before, (__mmask16)grown, (__m512)found));
        for (; grown != 0; grown &= grown - 1) {
            int64_t at = i + __builtin_ctz(grown);
            rescale(op, w, rows->row + at, rows->maxima[at], OF_TILES);
        }
    }
}

/* Turn a row's scores into weights, keep and sum them: zeros where it does not see. */
INLINE void weigh(const float *scores, float scale, float maximum, uint64_t seen, bool is_whole,
                  uint32_t *to, float *denominators)
{
    const u32v ones = (u32v){0} + 0x3f803f80;
    f32v weights[BLOCK_VECTORS], denominator = load_f32(denominators);
#pragma GCC unroll 4
    for (int i = 0; i < BLOCK_VECTORS; i++)
        weights[i] = exp2_nonpositive(
            multiply_add(load_f32(scores + i * LANES), splat(scale), splat(-maximum)));
#pragma GCC unroll 4
    for (int i = 0; i < BLOCK_VECTORS; i += 2, to += LANES) {
        u32v words = narrow_to_words(weights[i], weights[i + 1]);
        if (!is_whole)
            words = (u32v)_mm512_maskz_mov_epi16((__mmask32)(seen >> i * LANES), (__m512i)words);
        denominator = add_words(denominator, words, ones, true);
        store_words(to, words);
    }
    store_f32(denominators, denominator);
}

INLINE void soften_rows(const struct attention *op, const struct workspace *w,
                        struct softened *rows, bool is_whole)
{
    const float scale = score_scale(op, OF_TILES);
    float *denominators = w->denominators + rows->row * LANES;
    find_largest(w, rows, scale, is_whole);
    grow_maxima(op, w, rows);
    for (int64_t i = 0; i < rows->num_rows; i++) {
        for (int64_t d = 0; d < row_width(op); d += LANES) /* what values are added to next */
            __builtin_prefetch(w->sums + (rows->row + i) * row_width(op) + d, 1, 3);
        weigh(w->scores + i * BLOCK, scale, rows->maxima[i], rows->seen[i], is_whole,
              w->weights + i * BLOCK, denominators + i * LANES);
    }
}

/* Soften the scores of the `num_rows` rows of a pass, which begins at `row`, with a block, which
 * begins at position `start`. */
static void soften_pass(const struct attention *op, const struct workspace *w, int64_t row,
                        int64_t num_rows, int64_t start)
{
    struct softened rows;
    rows.row = row;
    rows.num_rows = num_rows;
    uint64_t seen_by_all = ~0ull;
    for (int64_t i = 0; i < num_rows; i++) {
        rows.seen[i] = seen_positions(op, w, row + i, start);
        seen_by_all &= rows.seen[i];
    }
    if (seen_by_all == ~0ull)
        soften_rows(op, w, &rows, true);
    else
        soften_rows(op, w, &rows, false);
}

#endif
#endif
