/* Tiles of y = gain y + shift + B u: some rows and neighbouring outputs of one module, where B lies
 * in float32 or bfloat16.
 *
 * An element is summed from 0 over the lora_ranks, fused, then added to the rest, whatever the
 * tile's size.
 */
#ifndef TOPWORK_LORA_EXPAND_TILE_H
#define TOPWORK_LORA_EXPAND_TILE_H

#include "lora/lora.h"

enum {
    NUM_SUMS = LANES == 16 ? 24 : 12, /* vectors of sums that stay in registers */
    TILE = NUM_SUMS / 2,              /* rows */
    WIDEST = 8,                       /* vectors of outputs in a tile of the fewest rows */
};

struct tile {
    float *y;                  /* of the first row and output */
    const float *gain, *shift; /* of the first output, or NULL */
    const float *u;            /* of the first row and lora_rank */
    const void *b;             /* of the first lora_rank and output */
    const char *ahead;         /* B that is fetched meanwhile, lora_rank for lora_rank; or NULL */
    float *sums;               /* [rows, num_outputs]: of lora_ranks before, or for those after */
    int64_t ldy, ldu, ldb, ld_ahead, num_ranks, num_outputs;
    bool is_first, is_last; /* there are no lora_ranks before or after these */
};

INLINE f32v load_or(const float *from, int64_t first, float otherwise)
{
    return from == NULL ? splat(otherwise) : load_f32(from + first);
}

INLINE void begin_tile(int num_rows, int num_vectors, const struct tile *t, int64_t at,
                       f32v sums[TILE][WIDEST])
{
#pragma GCC unroll 12
    for (int i = 0; i < num_rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < num_vectors; j++)
            sums[i][j] =
                t->is_first ? (f32v){0} : load_f32(t->sums + i * t->num_outputs + at + j * LANES);
}

INLINE void add_y(int num_rows, int num_vectors, const struct tile *t, int64_t at,
                  f32v sums[TILE][WIDEST])
{
    bool is_scaled = t->gain != NULL || t->shift != NULL;
#pragma GCC unroll 12
    for (int i = 0; i < num_rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < num_vectors; j++) {
            f32v y = load_f32(t->y + i * t->ldy + at + j * LANES);
            if (is_scaled)
                y = multiply_add(y, load_or(t->gain, at + j * LANES, 1),
                                 load_or(t->shift, at + j * LANES, 0));
            sums[i][j] = t->num_ranks > 0 ? y + sums[i][j] : y;
        }
}

/* Only when all is added: a store holds up loads of rows whose addresses end alike. */
INLINE void store_tile(int num_rows, int num_vectors, float *to, int64_t ld,
                       f32v sums[TILE][WIDEST])
{
#pragma GCC unroll 12
    for (int i = 0; i < num_rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < num_vectors; j++)
            store_f32(to + i * ld + j * LANES, sums[i][j]);
}

INLINE void expand_tile(int num_rows, int num_vectors, const struct tile *t, int64_t at,
                        enum item item)
{
    f32v sums[TILE][WIDEST];
    begin_tile(num_rows, num_vectors, t, at, sums);
    const char *b = element_or_null(t->b, at, item);
    int64_t size = item_bytes(item);
    uintptr_t ahead = (uintptr_t)t->ahead + (uintptr_t)(at * size);
    const float *u = t->u;
    for (int64_t rank = 0; rank < t->num_ranks;
         rank++, u++, b += t->ldb * size, ahead += (uintptr_t)(t->ld_ahead * size)) {
        f32v x[WIDEST];
#pragma GCC unroll 8
        for (int j = 0; j < num_vectors; j++)
            x[j] = load_whole(b + j * LANES * size, item == BF16);
        if (t->ahead != NULL)
            for (int64_t j = 0; j < num_vectors * LANES * size; j += LINE)
                prefetch((const void *)ahead, j);
#pragma GCC unroll 12
        for (int i = 0; i < num_rows; i++) {
            f32v factor = splat(u[i * t->ldu]);
#pragma GCC unroll 8
            for (int j = 0; j < num_vectors; j++)
                sums[i][j] = multiply_add(factor, x[j], sums[i][j]);
        }
    }
    if (t->is_last) {
        add_y(num_rows, num_vectors, t, at, sums);
        store_tile(num_rows, num_vectors, t->y + at, t->ldy, sums);
    } else
        store_tile(num_rows, num_vectors, t->sums + at, t->num_outputs, sums);
}

/* Do as many vectors of outputs at a time as leave the sums in registers. */
INLINE void expand_vectors(int num_rows, const struct tile *t, enum item item)
{
    int64_t at = 0;
    if (num_rows * 8 <= NUM_SUMS)
        for (; at + 8 * LANES <= t->num_outputs; at += 8 * LANES)
            expand_tile(num_rows, 8, t, at, item);
    if (num_rows * 4 <= NUM_SUMS)
        for (; at + 4 * LANES <= t->num_outputs; at += 4 * LANES)
            expand_tile(num_rows, 4, t, at, item);
    for (; at + 2 * LANES <= t->num_outputs; at += 2 * LANES)
        expand_tile(num_rows, 2, t, at, item);
    if (at < t->num_outputs)
        expand_tile(num_rows, 1, t, at, item);
}

INLINE void expand_rows(int64_t num_rows, const struct tile *t, enum item item)
{
#define ROWS(n) \
    case n: expand_vectors(n, t, item); break;
    switch (num_rows) {
        ROWS(1)
        ROWS(2)
        ROWS(3)
        ROWS(4)
        ROWS(5)
        ROWS(6)
#if LANES == 16
        ROWS(7)
        ROWS(8)
        ROWS(9)
        ROWS(10)
        ROWS(11)
        ROWS(12)
#endif
    }
#undef ROWS
}

static void expand_f32(int64_t num_rows, const struct tile *t) { expand_rows(num_rows, t, F32); }

static void expand_bf16(int64_t num_rows, const struct tile *t) { expand_rows(num_rows, t, BF16); }

INLINE void expand_items(int64_t num_rows, const struct tile *t, enum item item)
{
    (item == BF16 ? expand_bf16 : expand_f32)(num_rows, t);
}

#endif
