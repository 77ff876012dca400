/* The rows of a task from their queries to their output, and the online softmax between.
 *
 * Owns a task's memory and what a row is summed up in: a maximum, LANES denominators side by side
 * and a sum of values. A head's sink is what its rows have seen before their first block: a score
 * whose value is zero. In bfloat16 scores are to base 2, weights are rounded to bfloat16, also
 * where they become floats again, and the denominators sum them rounded. Knows nothing of pages.
 *
 * Rows of a task: its tokens' heads that share one KV head, token by token.
 */
#ifndef TOPWORK_ATTENTION_ONLINE_SOFTMAX_H
#define TOPWORK_ATTENTION_ONLINE_SOFTMAX_H

#include <math.h>

#include "attention/kv_block.h"
#include "attention/gemm.h"

enum {
    /* Rows that share one packing of K and V: fewer where threads would have few tasks each. They
     * decide speed only. */
    MOST_TASK_ROWS = 384,
    FEW_TASK_ROWS = 192,
    TILED_ROWS = 2 * TILE_ROWS, /* rows that attend together in tiles at most */
};

static const double LOG2_E = 1.4426950408889634;

struct workspace {
    uint32_t *queries;   /* [rows, depth] */
    uint32_t *keys;      /* [depth, BLOCK] */
    uint32_t *values;    /* [BLOCK, width], in pairs half of it */
    uint32_t *half;      /* [width]: values of a pair whose second position is hidden */
    float *scores;       /* [rows that attend together, BLOCK] */
    uint32_t *weights;   /* the same, in pairs the first half of a row; of tiles in their place */
    float *sums;         /* [rows, width]: unnormalised output */
    float *denominators; /* [rows, LANES] */
    float *maxima;       /* [rows] */
    int64_t *positions;  /* [rows] */
    void *widened_keys;  /* [BLOCK, head_dim] of the dtype of q; only where pages are in int8 */
    void *widened_values;
    struct tile_rows *told; /* what the thread has told its tiles */
};

INLINE int64_t group_size(const struct attention *op) { return op->num_heads / op->num_kv_heads; }

/* Return the tokens of a task of so many rows at most. */
INLINE int64_t task_tokens(const struct attention *op, int64_t num_rows)
{
    int64_t tokens = num_rows / group_size(op);
    return tokens > 0 ? tokens : 1;
}

/* Return so many words of scratch memory behind what is used of it; NULL where there is none. */
static void *take_words(char *memory, int64_t *used, int64_t num_words)
{
    int64_t start = *used;
    *used += round_up(num_words, LANES) * 4;
    return memory == NULL ? NULL : memory + start;
}

/* Cut scratch memory into the workspace; return its bytes. */
static int64_t cut_scratch(const struct attention *op, char *memory, struct workspace *w)
{
    enum form form = form_of(op);
    int64_t rows = task_tokens(op, MOST_TASK_ROWS) * group_size(op), width = row_width(op);
    int64_t depth = row_depth(op, form), used = 0;
    w->queries = take_words(memory, &used, rows * depth);
    w->keys = take_words(memory, &used, depth * BLOCK);
    w->values = take_words(memory, &used, (in_pairs(form) ? BLOCK / 2 : BLOCK) * width);
    w->half = take_words(memory, &used, width);
    int64_t pass_rows = form == OF_TILES ? TILED_ROWS : PRODUCT_ROWS;
    w->scores = take_words(memory, &used, pass_rows * BLOCK);
    w->weights = (uint32_t *)w->scores;
    if (form != OF_TILES)
        w->weights = take_words(memory, &used, pass_rows * BLOCK);
    w->sums = take_words(memory, &used, rows * width);
    w->denominators = take_words(memory, &used, rows * LANES);
    w->maxima = take_words(memory, &used, rows);
    w->positions = take_words(memory, &used, rows * 2);
    int64_t widened = op->is_int8 ? BLOCK * row_words(op) : 0;
    w->widened_keys = take_words(memory, &used, widened);
    w->widened_values = take_words(memory, &used, widened);
    return used;
}

/* Tell whether queries are negated in place of the scale: of tiles, where the largest score has to
 * become the largest scaled one. */
INLINE bool has_negated_queries(const struct attention *op, enum form form)
{
    return form == OF_TILES && op->scale < 0;
}

/* Return what the products of q and K are multiplied by. */
INLINE float score_scale(const struct attention *op, enum form form)
{
    float scale = (float)(is_bf16(form) ? op->scale * LOG2_E : op->scale);
    return has_negated_queries(op, form) ? -scale : scale;
}

/* Bring what a row has summed to a new maximum. */
INLINE void rescale(const struct attention *op, const struct workspace *w, int64_t row,
                    float maximum, enum form form)
{
    f32v x = splat(w->maxima[row] - maximum);
    f32v decay = is_bf16(form) ? exp2_nonpositive(x) : exp_nonpositive(x);
    float *sums = w->sums + row * row_width(op), *denominators = w->denominators + row * LANES;
    for (int64_t d = 0; d < row_width(op); d += LANES)
        store_f32(sums + d, load_f32(sums + d) * decay);
    store_f32(denominators, load_f32(denominators) * decay);
    w->maxima[row] = maximum;
}

/* Keep a row's weights for the products with values, and sum them as they are kept. */
INLINE void store_weights(const struct workspace *w, uint32_t *to, int64_t row,
                          const f32v weights[BLOCK / LANES], enum form form)
{
    const u32v ones = (u32v){0} + 0x3f803f80;
    f32v denominator = load_f32(w->denominators + row * LANES);
    if (in_pairs(form))
        for (int i = 0; i < BLOCK / LANES; i += 2, to += LANES) {
            u32v words = narrow_to_words(weights[i], weights[i + 1]);
            denominator = add_words(denominator, words, ones, true);
            store_words(to, words);
        }
    else
        for (int i = 0; i < BLOCK / LANES; i++, to += LANES) {
            f32v weight = is_bf16(form) ? round_floats(weights[i]) : weights[i];
            denominator += weight;
            store_words(to, (u32v)weight);
        }
    store_f32(w->denominators + row * LANES, denominator);
}

/* Turn a row's scores into weights and bring what it has summed to the new maximum. The row sees
 * positions [first, stop) of the block; all others have a weight of zero. */
INLINE void soften(const struct attention *op, const struct workspace *w, const float *from,
                   uint32_t *to, int64_t row, int64_t first, int64_t stop, enum form form,
                   bool is_whole)
{
    f32v scores[BLOCK / LANES], top = splat(w->maxima[row]);
    i32v is_seen[BLOCK / LANES];
    for (int i = 0; i < BLOCK / LANES; i++) {
        i32v position = lane_numbers() + i * LANES;
        is_seen[i] = (position < (int32_t)stop) & (position >= (int32_t)first);
        scores[i] = load_f32(from + i * LANES);
        if (!is_whole)
            scores[i] = select_lanes(is_seen[i], scores[i], splat(-INFINITY));
        top = larger(scores[i], top);
    }
    f32v maximum = splat(largest_of(top));
    if (maximum[0] != w->maxima[row])
        rescale(op, w, row, maximum[0], form);
    for (int i = 0; i < BLOCK / LANES; i++) {
        f32v x = scores[i] - maximum;
        scores[i] = is_bf16(form) ? exp2_nonpositive(x) : exp_nonpositive(x);
        if (!is_whole)
            scores[i] = select_lanes(is_seen[i], scores[i], splat(0));
    }
    store_weights(w, to, row, scores, form);
}

/* Return how many positions of a block, which begins at `start`, are up to a row's own. */
INLINE int64_t num_visible(const struct workspace *w, int64_t row, int64_t start)
{
    return smaller(w->positions[row] - start + 1, BLOCK);
}

/* Soften the scores of a row with a block, which begins at position `start`. */
INLINE void soften_row(const struct attention *op, const struct workspace *w, const float *from,
                       uint32_t *to, int64_t row, int64_t start, enum form form)
{
    int64_t last = w->positions[row] - start, stop = num_visible(w, row, start);
    int64_t first = op->window > 0 && last + 1 > op->window ? last + 1 - op->window : 0;
    if (stop == BLOCK && first == 0)
        soften(op, w, from, to, row, 0, BLOCK, form, true);
    else
        soften(op, w, from, to, row, first, stop, form, false);
}

/* Return the element of q's or out's row of a task where its head begins. */
INLINE int64_t head_start(const struct attention *op, const struct task *task, int64_t row,
                          int64_t stride)
{
    int64_t group = group_size(op), head = task->kv_head * group + row % group;
    return (task->first_token + row / group) * stride + head * op->head_dim;
}

/* Let the rows begin with their heads' sinks. */
static void begin_with_sinks(const struct attention *op, const struct task *task,
                             const struct workspace *w)
{
    int64_t group = group_size(op);
    const float *sinks = op->sinks + task->kv_head * group;
    for (int64_t row = 0; row < task->num_tokens * group; row++) {
        w->maxima[row] = (float)(sinks[row % group] * (op->is_bf16 ? LOG2_E : 1.0));
        w->denominators[row * LANES] = 1.0f;
    }
}

static void begin(const struct attention *op, const struct task *task, const struct workspace *w,
                  enum form form)
{
    int64_t depth = row_depth(op, form), words = row_words(op), size = is_bf16(form) ? 2 : 4;
    int64_t num_rows = task->num_tokens * group_size(op);
    for (int64_t row = 0; row < num_rows; row++) {
        const char *from = (const char *)op->q + head_start(op, task, row, op->q_stride) * size;
        uint32_t *to = w->queries + row * depth;
        for (int64_t d = 0; form == OF_WIDENED && d < depth; d += LANES)
            store_some(to, d, depth - d, false, load_some(from, d, depth - d, true));
        if (form != OF_WIDENED) {
            memcpy(to, from, (size_t)words * 4);
            memset(to + words, 0, (size_t)(depth - words) * 4);
        }
        for (int64_t d = 0; has_negated_queries(op, form) && d < words; d++)
            to[d] ^= 0x80008000;
        w->positions[row] = task->first_position + row / group_size(op);
        w->maxima[row] = -INFINITY;
    }
    memset(w->sums, 0, (size_t)(num_rows * row_width(op)) * sizeof(float));
    memset(w->denominators, 0, (size_t)(num_rows * LANES) * sizeof(float));
    if (op->sinks != NULL)
        begin_with_sinks(op, task, w);
}

static void finish(const struct attention *op, const struct task *task, const struct workspace *w)
{
    int64_t dim = op->head_dim, stride = op->num_heads * dim;
    for (int64_t row = 0; row < task->num_tokens * group_size(op); row++) {
        float total = sum_lanes(load_f32(w->denominators + row * LANES));
        int64_t start = head_start(op, task, row, stride);
        for (int64_t d = 0; d < dim; d += LANES)
            store_some(op->out, start + d, dim - d, op->is_bf16,
                       load_f32(w->sums + row * row_width(op) + d) / total);
    }
}

#endif
