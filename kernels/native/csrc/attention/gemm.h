/* Small matrix products over words.
 *
 * Owns the order in which a product adds, from the first word to the last whatever the tile's size,
 * so that a row's bits do not depend on the rows beside it. While it computes, memory can be asked
 * for what is needed next: a product alone leaves it idle. Knows nothing of what the numbers are
 * for.
 */
#ifndef TOPWORK_ATTENTION_GEMM_H
#define TOPWORK_ATTENTION_GEMM_H

#include "simd/words.h"

enum {
    PRODUCT_ROWS = 6, /* with so many vectors of columns all sums stay in registers */
    PRODUCT_VECTORS = LANES == 16 ? 4 : 2,
};

/* Rows of memory that a product asks for, two in each of its first steps. */
struct ahead {
    const char *base;
    const int64_t *offsets;       /* [2 num_steps] */
    int64_t num_steps, num_bytes; /* of each row: its first line, or more */
};

/* What b is made of: words of pairs, floats, or rows of bfloat16 or floats where they lie. */
enum factor { PAIRS, FLOATS, ROWS_OF_BF16, ROWS_OF_F32 };

/* c [rows, columns] += a [rows, depth] b [depth, columns]; `ld` are row lengths. */
struct product {
    float *c;
    const word *a, *b;
    const char *rows;       /* instead of b, with the bytes from there to each of its rows */
    const int64_t *offsets; /* [depth] */
    int64_t ldc, lda, ldb, depth;
    float scale; /* of a scaled product, which replaces c */
    struct ahead ahead;
};

INLINE void ask_ahead(const struct ahead *ahead, int64_t step)
{
    if (step >= ahead->num_steps)
        return;
    for (int64_t byte = 0; byte < ahead->num_bytes; byte += LINE) {
        prefetch(ahead->base, ahead->offsets[2 * step] + byte);
        prefetch(ahead->base, ahead->offsets[2 * step + 1] + byte);
    }
}

INLINE u32v load_columns(const struct product *p, int64_t at, int vector, enum factor factor)
{
    if (factor == PAIRS || factor == FLOATS)
        return load_words(p->b + at * p->ldb + vector * LANES);
    bool is_bf16 = factor == ROWS_OF_BF16;
    return (u32v)load_whole(p->rows + p->offsets[at] + vector * LANES * (is_bf16 ? 2 : 4), is_bf16);
}

INLINE void multiply_tile(int num_rows, int num_vectors, const struct product *p, bool is_scaled,
                          enum factor factor)
{
    f32v sums[PRODUCT_ROWS][PRODUCT_VECTORS];
#pragma GCC unroll 6
    for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 4
        for (int i = 0; i < num_vectors; i++)
            sums[row][i] = is_scaled ? splat(0.0f) : load_f32(p->c + row * p->ldc + i * LANES);
    const word *a = p->a;
    int64_t lda = p->lda;
    for (int64_t at = 0; at < p->depth; at++, a++) {
        u32v columns[PRODUCT_VECTORS];
        ask_ahead(&p->ahead, at);
#pragma GCC unroll 4
        for (int i = 0; i < num_vectors; i++)
            columns[i] = load_columns(p, at, i, factor);
#pragma GCC unroll 6
        for (int row = 0; row < num_rows; row++) {
            u32v factors = a[row * lda] - (u32v){0};
#pragma GCC unroll 4
            for (int i = 0; i < num_vectors; i++)
                sums[row][i] = add_words(sums[row][i], factors, columns[i], factor == PAIRS);
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 4
        for (int i = 0; i < num_vectors; i++)
            store_f32(p->c + row * p->ldc + i * LANES,
                      is_scaled ? sums[row][i] * p->scale : sums[row][i]);
}

INLINE void multiply_rows(int64_t num_rows, int num_vectors, const struct product *p,
                          bool is_scaled, enum factor factor)
{
    switch (num_rows) {
    case 1: multiply_tile(1, num_vectors, p, is_scaled, factor); break;
    case 2: multiply_tile(2, num_vectors, p, is_scaled, factor); break;
    case 3: multiply_tile(3, num_vectors, p, is_scaled, factor); break;
    case 4: multiply_tile(4, num_vectors, p, is_scaled, factor); break;
    case 5: multiply_tile(5, num_vectors, p, is_scaled, factor); break;
    default: multiply_tile(6, num_vectors, p, is_scaled, factor); break;
    }
}

/* Multiply 1 to 6 rows by any number of vectors of columns. */
INLINE void multiply(int64_t num_rows, int64_t num_vectors, struct product p, bool is_scaled,
                     enum factor factor)
{
    for (; num_vectors > 0; num_vectors -= PRODUCT_VECTORS) {
        if (num_vectors >= PRODUCT_VECTORS)
            multiply_rows(num_rows, PRODUCT_VECTORS, &p, is_scaled, factor);
        else if (num_vectors == 1)
            multiply_rows(num_rows, 1, &p, is_scaled, factor);
        else if (num_vectors == 2)
            multiply_rows(num_rows, 2, &p, is_scaled, factor);
        else
            multiply_rows(num_rows, PRODUCT_VECTORS - 1, &p, is_scaled, factor);
        if (factor == PAIRS || factor == FLOATS)
            p.b += PRODUCT_VECTORS * LANES;
        else
            p.rows += PRODUCT_VECTORS * LANES * (factor == ROWS_OF_BF16 ? 2 : 4);
        p.c += PRODUCT_VECTORS * LANES;
        p.ahead.num_steps = 0; /* all is asked for */
    }
}

/* Each a function of its own: what a caller keeps in registers would push sums out of them. */
#define DEFINE_PRODUCT(name, is_scaled, factor)                                       \
    static __attribute__((noinline)) void name(int64_t num_rows, int64_t num_vectors, \
                                               const struct product *p)               \
    {                                                                                 \
        multiply(num_rows, num_vectors, *p, is_scaled, factor);                       \
    }
DEFINE_PRODUCT(scaled_product_floats, true, FLOATS)
DEFINE_PRODUCT(scaled_product_pairs, true, PAIRS)
DEFINE_PRODUCT(add_product_floats, false, FLOATS)
DEFINE_PRODUCT(add_product_pairs, false, PAIRS)
DEFINE_PRODUCT(add_product_of_bf16_rows, false, ROWS_OF_BF16)
DEFINE_PRODUCT(add_product_of_f32_rows, false, ROWS_OF_F32)

#endif
