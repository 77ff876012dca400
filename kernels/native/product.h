/* Small matrix products over words.
 *
 * Owns the order in which a product adds, from the first word to the last whatever the tile's size,
 * so that a row's bits do not depend on the rows beside it. While it computes, memory can be asked
 * for what is needed next: a product alone leaves it idle. Knows nothing of what the numbers are.
 */
#ifndef TOPWORK_PRODUCT_H
#define TOPWORK_PRODUCT_H

#include "words.h"

enum {
    PRODUCT_ROWS = 6, /* with so many vectors of columns all sums stay in registers */
    PRODUCT_VECTORS = LANES == 16 ? 4 : 2,
};

/* Rows of memory whose first lines a product asks for, two in each of its first steps. */
struct ahead {
    const char *base;
    const int64_t *offsets; /* [2 num_steps] */
    int64_t num_steps;
};

/* c [rows, columns] += a [rows, depth] b [depth, columns]; `ld` are row lengths. */
struct product {
    float *c;
    const uint32_t *a, *b;
    int64_t ldc, lda, ldb, depth;
    float scale; /* of a scaled product, which replaces c */
    struct ahead ahead;
};

INLINE void multiply_tile(int num_rows, int num_vectors, const struct product *p, bool is_scaled,
                          bool in_pairs)
{
    f32v sums[PRODUCT_ROWS][PRODUCT_VECTORS];
#pragma GCC unroll 6
    for (int row = 0; row < num_rows; row++)
#pragma GCC unroll 4
        for (int i = 0; i < num_vectors; i++)
            sums[row][i] = is_scaled ? splat(0.0f) : load_f32(p->c + row * p->ldc + i * LANES);
    const uint32_t *a = p->a, *b = p->b;
    int64_t lda = p->lda, ldb = p->ldb;
    for (int64_t at = 0; at < p->depth; at++, a++, b += ldb) {
        u32v columns[PRODUCT_VECTORS];
        if (at < p->ahead.num_steps) {
            __builtin_prefetch(p->ahead.base + p->ahead.offsets[2 * at]);
            __builtin_prefetch(p->ahead.base + p->ahead.offsets[2 * at + 1]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < num_vectors; i++)
            columns[i] = load_words(b + i * LANES);
#pragma GCC unroll 6
        for (int row = 0; row < num_rows; row++) {
            u32v word = a[row * lda] - (u32v){0};
#pragma GCC unroll 4
            for (int i = 0; i < num_vectors; i++)
                sums[row][i] = add_words(sums[row][i], word, columns[i], in_pairs);
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
                          bool is_scaled, bool in_pairs)
{
    switch (num_rows) {
    case 1: multiply_tile(1, num_vectors, p, is_scaled, in_pairs); break;
    case 2: multiply_tile(2, num_vectors, p, is_scaled, in_pairs); break;
    case 3: multiply_tile(3, num_vectors, p, is_scaled, in_pairs); break;
    case 4: multiply_tile(4, num_vectors, p, is_scaled, in_pairs); break;
    case 5: multiply_tile(5, num_vectors, p, is_scaled, in_pairs); break;
    default: multiply_tile(6, num_vectors, p, is_scaled, in_pairs); break;
    }
}

/* Multiply 1 to 6 rows by any number of vectors of columns. */
INLINE void multiply(int64_t num_rows, int64_t num_vectors, struct product p, bool is_scaled,
                     bool in_pairs)
{
    for (; num_vectors > 0; num_vectors -= PRODUCT_VECTORS) {
        if (num_vectors >= PRODUCT_VECTORS)
            multiply_rows(num_rows, PRODUCT_VECTORS, &p, is_scaled, in_pairs);
        else if (num_vectors == 1)
            multiply_rows(num_rows, 1, &p, is_scaled, in_pairs);
        else if (num_vectors == 2)
            multiply_rows(num_rows, 2, &p, is_scaled, in_pairs);
        else
            multiply_rows(num_rows, PRODUCT_VECTORS - 1, &p, is_scaled, in_pairs);
        p.b += PRODUCT_VECTORS * LANES;
        p.c += PRODUCT_VECTORS * LANES;
    }
}

/* Each a function of its own: what a caller keeps in registers would push sums out of them. */
#define DEFINE_PRODUCT(name, is_scaled, in_pairs)                                     \
    static __attribute__((noinline)) void name(int64_t num_rows, int64_t num_vectors, \
                                               const struct product *p)               \
    {                                                                                 \
        multiply(num_rows, num_vectors, *p, is_scaled, in_pairs);                     \
    }
DEFINE_PRODUCT(scaled_product_floats, true, false)
DEFINE_PRODUCT(scaled_product_pairs, true, true)
DEFINE_PRODUCT(add_product_floats, false, false)
DEFINE_PRODUCT(add_product_pairs, false, true)

#endif
