/* Vectors of words of 32 bits: a word is one float32, or two bfloat16 that stand side by side.
 *
 * Pairs of bfloat16 are multiplied as they are only where the CPU has an instruction for it,
 * AVX512-BF16's dot product; elsewhere they become floats first, as few times as can be. Every lane
 * does the same whatever stands beside it.
 */
#ifndef TOPWORK_SIMD_WORDS_H
#define TOPWORK_SIMD_WORDS_H

#include "simd/vector.h"

#if LANES == 16 && defined(__AVX512BF16__)
#define HAS_DOTS 1
#else
#define HAS_DOTS 0
#endif

/* A word that others may have written as floats or pairs. */
typedef uint32_t __attribute__((may_alias)) word;

INLINE u32v load_words(const void *from)
{
    u32v x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store_words(void *to, u32v x) { memcpy(to, &x, sizeof x); }

/* Load up to LANES words; zeros past `count`. */
INLINE u32v load_some_words(const char *from, int64_t count)
{
    if (count >= LANES)
        return load_words(from);
#if LANES == 16
    return (u32v)_mm512_maskz_loadu_epi32((__mmask16)((1u << count) - 1), from);
#else
    return (u32v)load_some(from, 0, count, false);
#endif
}

/* Return the first elements of pairs, and the second ones. */
INLINE f32v first_floats(u32v pairs) { return (f32v)(pairs << 16); }

INLINE f32v second_floats(u32v pairs) { return (f32v)(pairs & 0xffff0000); }

/* Return sum + a b in every lane, for one product of float32 or, with HAS_DOTS, two of bfloat16:
 * of a pair the second element first, one fused multiply-add for each. */
INLINE f32v add_words(f32v sum, u32v a, u32v b, bool in_pairs)
{
#if HAS_DOTS
    if (in_pairs)
        return (f32v)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    (void)in_pairs;
#endif
    return multiply_add((f32v)a, (f32v)b, sum);
}

/* Round two vectors of floats to bfloat16, ties to even: words of neighbours. */
INLINE u32v narrow_to_words(f32v first, f32v second)
{
#if HAS_DOTS
    return (u32v)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#else
    (void)first, (void)second;
    __builtin_unreachable(); /* words are floats here */
#endif
}

typedef uint16_t halves __attribute__((vector_size(sizeof(u32v))));

#if defined(__clang__)
#define SHUFFLE_HALVES(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE_HALVES(a, b, ...) __builtin_shuffle(a, b, (halves){__VA_ARGS__})
#endif

#if LANES == 16
#define FIRST_COLUMNS                                                                             \
    0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, \
        13, 45, 14, 46, 15, 47
#define OTHER_COLUMNS                                                                           \
    16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, \
        59, 28, 60, 29, 61, 30, 62, 31, 63
#else
#define FIRST_COLUMNS 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define OTHER_COLUMNS 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#endif

/* Turn two rows of bfloat16, a vector of words each, into words of the elements in the same column:
 * the first LANES columns. */
INLINE u32v join_first(u32v a, u32v b)
{
    return (u32v)SHUFFLE_HALVES((halves)a, (halves)b, FIRST_COLUMNS);
}

/* The other columns. */
INLINE u32v join_second(u32v a, u32v b)
{
    return (u32v)SHUFFLE_HALVES((halves)a, (halves)b, OTHER_COLUMNS);
}

/* Return the largest lane; NaN only where all are. */
INLINE float largest_of(f32v x)
{
    f32v other;
    FOLD_LANES(x, other, larger(other, x));
    return x[0];
}

/* exp2(x) for x <= 0, exactly 1 at 0, NaN at NaN: for what is rounded to bfloat16, with a relative
 * error below 3e-6 by a polynomial of degree 4. Below -125 it gives exp2(-125), or with AVX-512
 * what that is or less, at -infinity zero. With AVX-512 x may be above 0 as well. */
INLINE f32v exp2_nonpositive(f32v x)
{
#if LANES == 16
    const int down = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    f32v r = (f32v)_mm512_reduce_ps((__m512)x, down); /* x less the integer below it */
    f32v p = multiply_add(r, splat(0.0134266857f), splat(0.0522424728f));
    p = multiply_add(p, r, splat(0.241280213f));
    p = multiply_add(p, r, splat(0.693044841f));
    p = multiply_add(p, r, splat(1.0f));
    return (f32v)_mm512_scalef_ps((__m512)p, (__m512)x); /* times 2 to that integer */
#else
    const float shift = 0x1.8p23f; /* adding it leaves the nearest integer in the low bits */
    x = larger(splat(-125.0f), x);
    f32v shifted = x + shift;
    f32v r = x - (shifted - shift);
    f32v p = multiply_add(r, splat(0.00958285317f), splat(0.055906425f));
    p = multiply_add(p, r, splat(0.240240986f));
    p = multiply_add(p, r, splat(0.693124193f));
    p = multiply_add(p, r, splat(1.0f));
    return (f32v)((u32v)p + ((u32v)shifted << 23));
#endif
}

#endif
