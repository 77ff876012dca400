/* Vectors of 16 floats, and the one small matrix product that attention and LoRA share.
 *
 * Owns the conversions, exp and the order in which a product adds: the first term first, one fused
 * multiply-add for each. Every lane and every row does the same operations whatever stands beside
 * it, so no result depends on a tile's size. Knows nothing of pages or adapters.
 *
 * GCC's vector extension, which clang has too; AVX-512 holds a vector in one register.
 */
#ifndef TOPWORK_VECTOR_H
#define TOPWORK_VECTOR_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum {
    LANES = 16,
    TILE_ROWS = 8,         /* rows of a product whose sums stay in registers */
    TILE_COLUMNS = 2 * LANES,
};

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (i32x16){__VA_ARGS__})
#endif

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

INLINE f32x16 splat(float x) { return x - (f32x16){0}; }

INLINE f32x16 select_lanes(i32x16 mask, f32x16 yes, f32x16 no)
{
    return (f32x16)((mask & (i32x16)yes) | (~mask & (i32x16)no));
}

INLINE f32x16 load_f32(const float *from)
{
    f32x16 x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store_f32(float *to, f32x16 x) { memcpy(to, &x, sizeof x); }

INLINE f32x16 widen(u16x16 x)
{
    u32x16 wide;
    for (int i = 0; i < LANES; i++) /* GCC makes four instructions of __builtin_convertvector */
        wide[i] = x[i];
    return (f32x16)(wide << 16);
}

/* Round to bfloat16, ties to even; a NaN stays one. */
INLINE u16x16 narrow(f32x16 x)
{
    u32x16 bits = (u32x16)x;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32x16 is_nan = (u32x16)(x != x);
    return __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), u16x16);
}

INLINE f32x16 load_whole(const void *from, bool is_bf16)
{
    u16x16 half;
    if (!is_bf16)
        return load_f32((const float *)from);
    memcpy(&half, from, sizeof half);
    return widen(half);
}

/* Load up to 16 elements of a row of float32 or bfloat16; zeros past `count`. */
INLINE f32x16 load_some(const void *row, int64_t first, int64_t count, bool is_bf16)
{
    size_t size = is_bf16 ? 2 : 4;
    const char *from = (const char *)row + first * (int64_t)size;
    if (count >= LANES)
        return load_whole(from, is_bf16);
    char padded[LANES * 4] = {0};
    memcpy(padded, from, (size_t)count * size);
    return load_whole(padded, is_bf16);
}

/* Store the first `count` lanes, at most 16, to a row of float32 or bfloat16. */
INLINE void store_some(void *row, int64_t first, int64_t count, bool is_bf16, f32x16 x)
{
    size_t size = is_bf16 ? 2 : 4, kept = (size_t)smaller(count, LANES) * size;
    char *to = (char *)row + first * (int64_t)size;
    u16x16 half = narrow(x);
    if (is_bf16 && kept == sizeof half)
        memcpy(to, &half, sizeof half);
    else if (kept == sizeof x)
        memcpy(to, &x, sizeof x);
    else
        memcpy(to, is_bf16 ? (const void *)&half : (const void *)&x, kept);
}

/* exp(x) for x <= 0, exactly 1 at 0, NaN at NaN; what lies below -86 gives exp(-86).
 * Two-part reduction by ln 2 and a polynomial of degree 7; relative error below 0.7 * 2^-23. */
INLINE f32x16 exp_nonpositive(f32x16 x)
{
    const float shift = 0x1.8p23f; /* adding it leaves the nearest integer in the low bits */
    x = select_lanes(x < -86.0f, splat(-86.0f), x);
    f32x16 shifted = x * 1.44269504f + shift;
    f32x16 n = shifted - shift;
    f32x16 r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    f32x16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r;
    return (f32x16)((u32x16)(p + 1.0f) + ((u32x16)shifted << 23));
}

/* Fold a vector onto itself: lane i with lane i ^ 8, then ^ 4, ^ 2, ^ 1. */
#define FOLD_LANES(x, other, combine)                                                    \
    do {                                                                                 \
        other = SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);     \
        x = combine;                                                                     \
        other = SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);     \
        x = combine;                                                                     \
        other = SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);     \
        x = combine;                                                                     \
        other = SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);     \
        x = combine;                                                                     \
    } while (0)

INLINE float sum_lanes(f32x16 x)
{
    f32x16 other;
    FOLD_LANES(x, other, x + other);
    return x[0];
}

INLINE float largest_lane(f32x16 x)
{
    f32x16 other;
    FOLD_LANES(x, other, select_lanes(other > x, other, x));
    return x[0];
}

INLINE void product_tile(int num_rows, float *c, int64_t ldc, const float *a, int64_t lda,
                         const float *b, int64_t ldb, int64_t depth)
{
    f32x16 sums[TILE_ROWS][2];
#pragma GCC unroll 8
    for (int row = 0; row < num_rows; row++) {
        sums[row][0] = load_f32(c + row * ldc);
        sums[row][1] = load_f32(c + row * ldc + LANES);
    }
    for (int64_t i = 0; i < depth; i++) {
        f32x16 left = load_f32(b + i * ldb), right = load_f32(b + i * ldb + LANES);
#pragma GCC unroll 8
        for (int row = 0; row < num_rows; row++) {
            f32x16 factor = splat(a[row * lda + i]);
            sums[row][0] += factor * left;
            sums[row][1] += factor * right;
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < num_rows; row++) {
        store_f32(c + row * ldc, sums[row][0]);
        store_f32(c + row * ldc + LANES, sums[row][1]);
    }
}

/* c [num_rows, 32] += a [num_rows, depth] b [depth, 32], for 1 to 8 rows; `ld` are row lengths. */
static inline void add_product(int64_t num_rows, float *c, int64_t ldc, const float *a,
                               int64_t lda, const float *b, int64_t ldb, int64_t depth)
{
    switch (num_rows) {
    case 1: product_tile(1, c, ldc, a, lda, b, ldb, depth); break;
    case 2: product_tile(2, c, ldc, a, lda, b, ldb, depth); break;
    case 3: product_tile(3, c, ldc, a, lda, b, ldb, depth); break;
    case 4: product_tile(4, c, ldc, a, lda, b, ldb, depth); break;
    case 5: product_tile(5, c, ldc, a, lda, b, ldb, depth); break;
    case 6: product_tile(6, c, ldc, a, lda, b, ldb, depth); break;
    case 7: product_tile(7, c, ldc, a, lda, b, ldb, depth); break;
    default: product_tile(8, c, ldc, a, lda, b, ldb, depth); break;
    }
}

#endif
