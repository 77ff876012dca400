/* K and V of 64 positions, out of their pages and as products want them: K as columns, and V,
 * where pairs of bfloat16 are multiplied as they are, in words of two positions. Elsewhere all
 * words are floats. The rows of the next block are asked of memory meanwhile, but for their first
 * lines, which products ask for where they are not of tiles.
 */
#ifndef TOPWORK_ATTENTION_KV_BLOCK_H
#define TOPWORK_ATTENTION_KV_BLOCK_H

#include "attention/int8_rows.h"
#include "simd/amx.h"

enum {
    BLOCK = 64, /* positions whose softmax is taken at once; part of the result's definition */
};

/* AttentionOp of ops.py. */
struct attention {
    const void *q, *k_pages, *v_pages;
    void *out;
    int64_t q_stride, num_heads, num_kv_heads, head_dim, page_size, is_bf16;
    int64_t window;  /* positions that a row sees, its own the last; 0: all */
    int64_t is_int8; /* K and V in their pages, as int8_rows.h has it */
    double scale;
    const float *sinks; /* [HQ]: a score of each head that is no position's; null: none */
};

/* Tokens of a sequence, with the heads that share a KV head. */
struct task {
    const int64_t *pages; /* of the sequence */
    int64_t first_token, num_tokens, first_position, kv_head;
};

/* Bytes from the pages' begin to the rows of a block's positions; past `count` the last again. */
struct block {
    int64_t count, offsets[BLOCK];
};

/* The words that products are of: float32, bfloat16 widened to it, or pairs of bfloat16, which dot
 * products of vectors multiply or tiles. Of no two are the bits the same. */
enum form { OF_FLOATS, OF_WIDENED, OF_PAIRS, OF_TILES };

INLINE enum form form_of(const struct attention *op)
{
    if (!op->is_bf16)
        return OF_FLOATS;
    return !HAS_DOTS ? OF_WIDENED : HAS_TILES && may_use_amx() ? OF_TILES : OF_PAIRS;
}

INLINE bool is_bf16(enum form form) { return form != OF_FLOATS; }

INLINE bool in_pairs(enum form form) { return form == OF_PAIRS || form == OF_TILES; }

/* Return the words of a row of q or K in memory, and as products want it, zeros at its end. */
INLINE int64_t row_words(const struct attention *op)
{
    return op->is_bf16 ? op->head_dim / 2 : op->head_dim;
}

INLINE int64_t row_depth(const struct attention *op, enum form form)
{
    if (form == OF_TILES)
        return round_up(op->head_dim / 2, TILE_STEPS);
    return form == OF_PAIRS ? op->head_dim / 2 : op->head_dim;
}

/* Return the bytes of a row of K or V in its page. */
INLINE int64_t stored_row_bytes(const struct attention *op)
{
    return op->is_int8 ? op->head_dim + SCALE_BYTES : row_words(op) * 4;
}

/* Return the columns of a row of sums or packed V: whole vectors. */
INLINE int64_t row_width(const struct attention *op) { return round_up(op->head_dim, LANES); }

/* Return the positions that the task's last token sees. */
INLINE int64_t positions_of(const struct task *task)
{
    return task->first_position + task->num_tokens;
}

/* Return the first position of the first block that any row of the task sees. */
INLINE int64_t first_block(const struct attention *op, const struct task *task)
{
    int64_t unseen = op->window > 0 ? task->first_position + 1 - op->window : 0;
    return unseen > 0 ? unseen / BLOCK * BLOCK : 0;
}

INLINE void find_block(const struct attention *op, const struct task *task, int64_t first,
                       int64_t num_positions, struct block *block)
{
    int64_t row_size = stored_row_bytes(op);
    int64_t page = first / op->page_size, offset = first % op->page_size;
    block->count = smaller(BLOCK, num_positions - first);
    for (int64_t j = 0; j < block->count; page++, offset = 0) {
        int64_t head = task->pages[page] * op->num_kv_heads + task->kv_head;
        int64_t at = (head * op->page_size + offset) * row_size;
        int64_t stop = smaller(block->count, j + op->page_size - offset);
        for (; j < stop; j++, at += row_size)
            block->offsets[j] = at;
    }
    for (int64_t j = block->count; j < BLOCK; j++)
        block->offsets[j] = block->offsets[block->count - 1];
}

/* Write the rows of a block in int8 as those of another dtype would lie in memory, K and V, and
 * find them there; the next block's are asked of memory. */
INLINE void widen_block(const struct attention *op, const struct block *block,
                        const struct block *next, char *keys, char *values, enum form form,
                        struct block *widened)
{
    int64_t size = row_words(op) * 4;
    widened->count = block->count;
    for (int64_t j = 0; j < BLOCK; j++) {
        int64_t at = smaller(j, block->count - 1) * size;
        widened->offsets[j] = at;
        if (j >= block->count)
            continue;
        for (int64_t byte = 0; byte < op->head_dim + SCALE_BYTES; byte += LINE) {
            prefetch(op->k_pages, next->offsets[j] + byte);
            prefetch(op->v_pages, next->offsets[j] + byte);
        }
        const char *k = (const char *)op->k_pages + block->offsets[j];
        const char *v = (const char *)op->v_pages + block->offsets[j];
        widen_int8_row(k, op->head_dim, keys + at, is_bf16(form));
        widen_int8_row(v, op->head_dim, values + at, is_bf16(form));
    }
}

/* Lay out up to LANES words of as many rows of K as columns. */
INLINE void pack_square(const char *pages, const int64_t *offsets, const int64_t *next,
                        int64_t num_words, bool asks, enum form form, uint32_t *keys)
{
    f32v square[LANES];
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) {
        if (asks)
            prefetch(pages, next[j]);
        square[j] = (f32v)load_some_words(pages + offsets[j], num_words);
    }
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (i < num_words && form == OF_WIDENED) {
            store_words(keys + 2 * i * BLOCK, (u32v)first_floats((u32v)square[i]));
            store_words(keys + (2 * i + 1) * BLOCK, (u32v)second_floats((u32v)square[i]));
        } else if (i < num_words || form == OF_TILES) {
            store_words(keys + i * BLOCK, (u32v)square[i]);
        }
}

/* Lay out a block's K as [depth, position]. */
INLINE void pack_keys(const struct attention *op, const struct block *block,
                      const struct block *next, uint32_t *keys, enum form form)
{
    int64_t num_words = row_words(op);
    for (int64_t j = 0; j < block->count; j += LANES)
        for (int64_t at = 0; at < num_words; at += LANES) {
            const char *pages = (const char *)op->k_pages + at * 4;
            const int64_t *offsets = block->offsets + j, *later = next->offsets + j;
            uint32_t *to = keys + at * (form == OF_WIDENED ? 2 : 1) * BLOCK + j;
            bool asks = at != 0 || form == OF_TILES;
            if (num_words - at >= LANES)
                pack_square(pages, offsets, later, LANES, asks, form, to);
            else
                pack_square(pages, offsets, later, num_words - at, asks, form, to);
        }
}

/* Lay out the rows of V of two positions as words of both. */
INLINE void pack_pair(const char *pages, const int64_t *offsets, const int64_t *next,
                      int64_t num_words, enum form form, uint32_t *values)
{
    for (int64_t at = 0; at < num_words; at += LANES, pages += LANES * 4, values += LANES * 2) {
        int64_t rest = num_words - at;
        u32v first = load_some_words(pages + offsets[0], rest);
        u32v second = load_some_words(pages + offsets[1], rest);
        if (at != 0 || form == OF_TILES) {
            prefetch(pages, next[0]);
            prefetch(pages, next[1]);
        }
        store_words(values, join_first(first, second));
        if (rest > LANES / 2)
            store_words(values + LANES, join_second(first, second));
    }
}

/* Lay out one position's row of V as floats. */
INLINE void pack_floats(const char *pages, int64_t offset, int64_t next, int64_t head_dim,
                        enum form form, uint32_t *values)
{
    int64_t size = is_bf16(form) ? 2 : 4;
    for (int64_t at = 0; at < head_dim; at += LANES) {
        if (at != 0)
            prefetch(pages, next + at * size);
        f32v x = load_some(pages + offset, at, head_dim - at, is_bf16(form));
        store_words(values + at, (u32v)x);
    }
}

/* Lay out a block's V as [position or pair of them, width]. */
INLINE void pack_values(const struct attention *op, const struct block *block,
                        const struct block *next, uint32_t *values, enum form form)
{
    const char *pages = op->v_pages;
    int64_t width = row_width(op);
    int step = in_pairs(form) ? 2 : 1;
    for (int64_t j = 0; j < block->count; j += step, values += width) {
        const int64_t *offsets = block->offsets + j, *later = next->offsets + j;
        if (in_pairs(form))
            pack_pair(pages, offsets, later, row_words(op), form, values);
        else
            pack_floats(pages, *offsets, *later, op->head_dim, form, values);
    }
}

#endif
