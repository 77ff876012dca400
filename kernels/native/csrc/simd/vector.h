/* Vectors of floats as wide as a register.
 *
 * Every lane does the same operations whatever stands beside it.
 *
 * GCC's vector extension, which clang has too. LANES is 16 with AVX-512 and 8 with AVX2; sums that
 * are kept for each lane differ between the two, within one machine they never do. f32v, i32v, u32v
 * and u16v have so many elements, u64v and f64v half as many. A vector wider than a register would
 * stay in memory.
 */
#ifndef TOPWORK_SIMD_VECTOR_H
#define TOPWORK_SIMD_VECTOR_H

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (i32v){__VA_ARGS__})
#endif

/* Each has the types and, for its number of lanes:
 * - lane_numbers: 0, 1, 2 and so on;
 * - multiply_add: a b + c, rounded once. A compiler fuses products and sums by itself only where no
 *   branch lies between them, which may differ from one tile to the next;
 * - to_floats: two halves, each rounded once;
 * - FOLD_LANES: combine each lane with the one half a vector away, then half of that, down to 1;
 * - sum_lanes_of_four: store the sum_lanes of four vectors, the same bits, folding them together;
 * - transpose: turn LANES vectors. */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "simd/lanes16.h"
#else
#include "simd/lanes8.h"
#endif

enum { TILE_COLUMNS = 2 * LANES };

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

INLINE f32v splat(float x) { return x - (f32v){0}; }

INLINE f32v select_lanes(i32v mask, f32v yes, f32v no)
{
    return (f32v)((mask & (i32v)yes) | (~mask & (i32v)no));
}

/* Return a where it is larger, else b: b if either is NaN. */
INLINE f32v larger(f32v a, f32v b)
{
#if LANES == 16
    return (f32v)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select_lanes(a > b, a, b);
#endif
}

enum {
    LINE = 64, /* bytes that memory hands out at once */
};

/* Ask memory for a line, so many bytes behind `from`: perhaps behind all that this points into,
 * where a pointer itself must not lead. It is brought into the second cache, as the first has few
 * places for lines that are on their way: streams of weights are read faster so. A function that
 * does no more than fetch must be INLINE: GCC takes it for one without effect. */
INLINE void prefetch(const void *from, int64_t num_bytes)
{
    __builtin_prefetch((const void *)((uintptr_t)from + (uintptr_t)num_bytes), 0, 2);
}

/* Bring a line into the first cache, for what is read soon and lies in the second already. */
INLINE void prefetch_near(const void *from, int64_t num_bytes)
{
    __builtin_prefetch((const void *)((uintptr_t)from + (uintptr_t)num_bytes), 0, 3);
}

INLINE f32v load_f32(const void *from)
{
    f32v x;
    memcpy(&x, from, sizeof x);
    return x;
}

/* Return the float32 that lies here in every lane. */
INLINE f32v splat_f32(const void *from)
{
    float x;
    memcpy(&x, from, sizeof x);
    return splat(x);
}

INLINE void store_f32(void *to, f32v x) { memcpy(to, &x, sizeof x); }

INLINE f32v widen(u16v x)
{
    u32v wide;
    for (int i = 0; i < LANES; i++) /* GCC makes four instructions of __builtin_convertvector */
        wide[i] = x[i];
    return (f32v)(wide << 16);
}

/* Round to bfloat16, ties to even, which stand in the upper halves; a NaN stays one. */
INLINE u32v round_bits(f32v x)
{
    u32v bits = (u32v)x;
    u32v rounded = bits + 0x7fff + ((bits >> 16) & 1);
    u32v is_nan = (u32v)(x != x);
    return (is_nan & 0x7fc00000) | (~is_nan & rounded);
}

INLINE f32v round_floats(f32v x) { return (f32v)(round_bits(x) & 0xffff0000); }

INLINE u16v narrow(f32v x)
{
#if LANES == 16 && defined(__AVX512BF16__)
    const int denormal = 0x20, nan = 0x81; /* which vcvtneps2bf16 makes something else of */
    if (_mm512_fpclass_ps_mask((__m512)x, denormal | nan) == 0)
        return (u16v)_mm512_cvtneps_pbh((__m512)x);
#endif
    return __builtin_convertvector(round_bits(x) >> 16, u16v);
}

INLINE f32v load_whole(const void *from, bool is_bf16)
{
    u16v half;
    if (!is_bf16)
        return load_f32(from);
    memcpy(&half, from, sizeof half);
    return widen(half);
}

/* Load up to LANES elements of a row of float32 or bfloat16; zeros past `count`. */
INLINE f32v load_some(const void *row, int64_t first, int64_t count, bool is_bf16)
{
    size_t size = is_bf16 ? 2 : 4;
    const char *from = (const char *)row + first * (int64_t)size;
    if (count >= LANES)
        return load_whole(from, is_bf16);
    char padded[LANES * 4] = {0};
    memcpy(padded, from, (size_t)count * size);
    return load_whole(padded, is_bf16);
}

/* Store the first `count` lanes, or all if there are fewer, to a row of float32 or bfloat16. */
INLINE void store_some(void *row, int64_t first, int64_t count, bool is_bf16, f32v x)
{
    size_t size = is_bf16 ? 2 : 4, kept = (size_t)smaller(count, LANES) * size;
    char *to = (char *)row + first * (int64_t)size;
    u16v half = narrow(x);
    if (is_bf16 && kept == sizeof half)
        memcpy(to, &half, sizeof half);
    else if (kept == sizeof x)
        memcpy(to, &x, sizeof x);
    else
        memcpy(to, is_bf16 ? (const void *)&half : (const void *)&x, kept);
}

/* exp(x) for x <= 0, exactly 1 at 0, NaN at NaN; what lies below -86 gives exp(-86).
 * Two-part reduction by ln 2 and a polynomial of degree 7; relative error below 0.7 * 2^-23. */
INLINE f32v exp_nonpositive(f32v x)
{
    const float shift = 0x1.8p23f; /* adding it leaves the nearest integer in the low bits */
    x = larger(splat(-86.0f), x);
    f32v shifted = x * 1.44269504f + shift;
    f32v n = shifted - shift;
    f32v r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    f32v p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r;
    return (f32v)((u32v)(p + 1.0f) + ((u32v)shifted << 23));
}

INLINE float sum_lanes(f32v x)
{
    f32v other;
    FOLD_LANES(x, other, x + other);
    return x[0];
}

INLINE float largest_lane(f32v x)
{
    f32v other;
    FOLD_LANES(x, other, select_lanes(other > x, other, x));
    return x[0];
}

#endif
