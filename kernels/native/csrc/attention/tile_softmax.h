/* The online softmax of rows whose scores and weights are of tiles.
 *
 * A few rows at once: one alone waits for its largest score, and for its weights at its end. A
 * row's own operations and their order are those of `soften`, with `scale` applied to scores first,
 * so that its bits do not depend on the rows beside it.
 */
#ifndef TOPWORK_ATTENTION_TILE_SOFTMAX_H
#define TOPWORK_ATTENTION_TILE_SOFTMAX_H

#include "attention/online_softmax.h"

#if HAS_TILES

enum {
    SOFTENED_ROWS = 4, /* at once: their scores stay in registers */
    BLOCK_VECTORS = BLOCK / LANES,
};

/* Rows that are softened at once. */
struct softened {
    int64_t row; /* the first of them */
    const float *scores;
    uint32_t *weights;
    uint64_t seen[SOFTENED_ROWS]; /* the positions of the block, from the lowest bit on */
};

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

/* Load and scale a row's scores, -infinity where it does not see; return the larger ones of them
 * and its maximum so far. */
INLINE f32v load_scores(const float *from, float scale, uint64_t seen, bool is_whole, float maximum,
                        f32v scores[BLOCK_VECTORS])
{
    f32v tops[BLOCK_VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < BLOCK_VECTORS; i++) {
        f32v x = load_f32(from + i * LANES) * scale;
        if (!is_whole)
            x = (f32v)_mm512_mask_mov_ps((__m512)splat(-INFINITY), (__mmask16)(seen >> i * LANES),
                                         (__m512)x);
        scores[i] = x;
        tops[i] = larger(x, splat(maximum)); /* no NaN */
    }
    return larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]));
}

/* Turn a row's scores into weights, keep and sum them: zeros where it does not see. */
INLINE void weigh(const f32v scores[BLOCK_VECTORS], float maximum, uint64_t seen, bool is_whole,
                  uint32_t *to, float *denominators)
{
    const u32v ones = (u32v){0} + 0x3f803f80;
    f32v weights[BLOCK_VECTORS], denominator = load_f32(denominators);
#pragma GCC unroll 4
    for (int i = 0; i < BLOCK_VECTORS; i++)
        weights[i] = exp2_nonpositive(scores[i] - splat(maximum));
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

INLINE void soften_at_once(const struct attention *op, const struct workspace *w,
                           const struct softened *rows, int num_rows, bool is_whole)
{
    const float scale = score_scale(op, OF_TILES), *known = w->maxima + rows->row;
    f32v scores[SOFTENED_ROWS][BLOCK_VECTORS], tops[SOFTENED_ROWS];
    float maxima[SOFTENED_ROWS];
#pragma GCC unroll 4
    for (int i = 0; i < num_rows; i++)
        tops[i] = load_scores(rows->scores + i * BLOCK, scale, rows->seen[i], is_whole, known[i],
                              scores[i]);
#pragma GCC unroll 4
    for (int i = num_rows; i < SOFTENED_ROWS; i++)
        tops[i] = tops[0];
    __m128 largest = largest_of_four(tops);
    _mm_storeu_ps(maxima, largest);
    __mmask8 all = (__mmask8)((1 << num_rows) - 1);
    __m128 before = _mm_maskz_loadu_ps(all, known);
    unsigned grown = _mm_mask_cmp_ps_mask(all, largest, before, _CMP_NEQ_UQ);
    for (; grown != 0; grown &= grown - 1) {
        int i = __builtin_ctz(grown);
        rescale(op, w, rows->row + i, maxima[i], OF_TILES);
    }
#pragma GCC unroll 4
    for (int i = 0; i < num_rows; i++)
        weigh(scores[i], maxima[i], rows->seen[i], is_whole, rows->weights + i * BLOCK,
              w->denominators + (rows->row + i) * LANES);
}

/* Return the positions of a block, which begins at `start`, that a row sees: bits. */
INLINE uint64_t seen_positions(const struct attention *op, const struct workspace *w, int64_t row,
                               int64_t start)
{
    int64_t last = w->positions[row] - start;
    int64_t first = op->window > 0 && last + 1 > op->window ? last + 1 - op->window : 0;
    uint64_t seen = last >= BLOCK - 1 ? ~0ull : (2ull << last) - 1;
    return first >= BLOCK ? 0 : seen & ~0ull << first;
}

INLINE void soften_few(const struct attention *op, const struct workspace *w, struct softened *rows,
                       int64_t start, int num_rows)
{
    uint64_t seen_by_all = ~0ull;
    for (int i = 0; i < num_rows; i++) {
        rows->seen[i] = seen_positions(op, w, rows->row + i, start);
        seen_by_all &= rows->seen[i];
    }
    if (seen_by_all == ~0ull)
        soften_at_once(op, w, rows, num_rows, true);
    else
        soften_at_once(op, w, rows, num_rows, false);
}

/* Soften the scores of the `num_rows` rows of a pass, which begins at `row`, with a block, which
 * begins at position `start`. */
static void soften_pass(const struct attention *op, const struct workspace *w, int64_t row,
                        int64_t num_rows, int64_t start)
{
    for (int64_t i = 0; i < num_rows; i += SOFTENED_ROWS) {
        struct softened rows = {
            .row = row + i,
            .scores = w->scores + i * BLOCK,
            .weights = w->weights + i * BLOCK,
        };
        switch (num_rows - i) {
        case 1: soften_few(op, w, &rows, start, 1); break;
        case 2: soften_few(op, w, &rows, start, 2); break;
        case 3: soften_few(op, w, &rows, start, 3); break;
        default: soften_few(op, w, &rows, start, SOFTENED_ROWS); break;
        }
    }
}

#endif
#endif
