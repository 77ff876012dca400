/* Products of bytes, four to a lane, added up as integers: exactly, so in any order the same bits.
 *
 * Both factors are signed and at most 127 in size. AVX2 and AVX-512 have only instructions that
 * take one of them unsigned. The dot products of VNNI get weights shifted up by 128: of a row's
 * products that makes 128 * the sum of its inputs too much. Without VNNI the sizes of inputs are
 * multiplied, and the weights of negative ones have all bits turned over, which makes -w - 1 of w:
 * too much is then the sum of the negative inputs. Either is known of a row by itself, its shift,
 * and taken off its sums. Of the pairs that are added up in 16 bits none is above 2 * 127 * 128.
 */
#ifndef TOPWORK_SIMD_BYTES_H
#define TOPWORK_SIMD_BYTES_H

#include "simd/words.h"

#if (LANES == 16 && defined(__AVX512VNNI__)) || (LANES == 8 && defined(__AVXVNNI__))
#define HAS_BYTE_DOTS 1
#else
#define HAS_BYTE_DOTS 0
#endif

enum {
    QUAD = 4,           /* bytes of a lane */
    LARGEST_BYTE = 127, /* so that there is a -x of every x */
    MOST_INPUT_BYTES = 2,
    INPUT_BYTES = HAS_BYTE_DOTS ? 1 : MOST_INPUT_BYTES, /* of an input as it is multiplied */
};

typedef int8_t i8v __attribute__((vector_size(LANES)));

/* Four inputs of a row in each lane: themselves, or their sizes, and which are negative. */
struct quad {
    u32v bytes, signs;
};

INLINE u32v splat_bytes(const int8_t *from)
{
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word - (u32v){0};
}

/* Load fours of bytes from the `first` of them on; zeros where there are none. */
INLINE u32v load_quads(const char *from, int64_t first, int64_t count)
{
    return first < count ? load_some_words(from + first * QUAD, count - first) : (u32v){0};
}

/* Return the same four inputs for every lane, of those that `store_byte_inputs` has stored. */
INLINE struct quad splat_quad(const int8_t *from)
{
    struct quad x = {.bytes = splat_bytes(from)};
    if (!HAS_BYTE_DOTS)
        x.signs = splat_bytes(from + QUAD);
    return x;
}

/* Return what these inputs make too much of sums. */
INLINE i32v shifts_of(i32v inputs) { return HAS_BYTE_DOTS ? inputs * 128 : inputs & inputs >> 31; }

/* Return what a sum of products begins with, for inputs that have this shift. */
INLINE i32v dot_start(int32_t shift) { return -shift - (i32v){0}; }

/* Return sum + the products of inputs and weights, and what of a shift is theirs, in every lane. */
INLINE i32v dot_quads(i32v sum, struct quad x, u32v weights)
{
#if HAS_BYTE_DOTS && LANES == 16
    return (i32v)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)(weights ^ 0x80808080),
                                     (__m512i)x.bytes);
#elif HAS_BYTE_DOTS
    return (i32v)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)(weights ^ 0x80808080),
                                         (__m256i)x.bytes);
#elif LANES == 16
    __m512i pairs = _mm512_maddubs_epi16((__m512i)x.bytes, (__m512i)(weights ^ x.signs));
    return sum + (i32v)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
    __m256i pairs = _mm256_maddubs_epi16((__m256i)x.bytes, (__m256i)(weights ^ x.signs));
    return sum + (i32v)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

/* Do the same for eight inputs that are not crowded: two pairs are added up in 16 bits first. */
INLINE i32v dot_two_quads(i32v sum, const struct quad x[2], u32v first, u32v second)
{
#if HAS_BYTE_DOTS
    return dot_quads(dot_quads(sum, x[0], first), x[1], second);
#elif LANES == 16
    __m512i pairs = _mm512_maddubs_epi16((__m512i)x[0].bytes, (__m512i)(first ^ x[0].signs));
    __m512i others = _mm512_maddubs_epi16((__m512i)x[1].bytes, (__m512i)(second ^ x[1].signs));
    pairs = _mm512_add_epi16(pairs, others);
    return sum + (i32v)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
    __m256i pairs = _mm256_maddubs_epi16((__m256i)x[0].bytes, (__m256i)(first ^ x[0].signs));
    __m256i others = _mm256_maddubs_epi16((__m256i)x[1].bytes, (__m256i)(second ^ x[1].signs));
    pairs = _mm256_add_epi16(pairs, others);
    return sum + (i32v)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

/* Tell whether any eight of some inputs, as they are stored, are crowded: the products of two pairs
 * of them may need more than 16 bits, which 255 * 128 do not. */
INLINE bool is_crowded(const int8_t *inputs, int num_inputs)
{
    __m256i over = _mm256_setzero_si256();
    for (int i = 0; i < num_inputs * INPUT_BYTES; i += 32) {
        __m256i quads = _mm256_loadu_si256((const __m256i *)(inputs + i));
        __m256i pairs = _mm256_maddubs_epi16(quads, _mm256_set1_epi64x(0x01010101)); /* of sizes */
        pairs = _mm256_add_epi16(pairs, _mm256_shuffle_epi32(pairs, 0x4e));
        over = _mm256_or_si256(over, _mm256_cmpgt_epi16(pairs, _mm256_set1_epi16(255)));
    }
    return !_mm256_testz_si256(over, over);
}

/* Return sums + the products of weights from 0 to 15 and inputs, for `small_sums`: without dot
 * products pairs of them in 16 bits, where there is room for 8 of 2 * 15 * 127. */
INLINE u32v add_small_quads(u32v sums, u32v weights, u32v inputs)
{
#if HAS_BYTE_DOTS && LANES == 16
    return (u32v)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)inputs);
#elif HAS_BYTE_DOTS
    return (u32v)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)inputs);
#elif LANES == 16
    __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, (__m512i)inputs);
    return (u32v)_mm512_add_epi16((__m512i)sums, pairs);
#else
    __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, (__m256i)inputs);
    return (u32v)_mm256_add_epi16((__m256i)sums, pairs);
#endif
}

/* Return the sum of each lane. */
INLINE i32v small_sums(u32v sums)
{
#if HAS_BYTE_DOTS
    return (i32v)sums;
#elif LANES == 16
    return (i32v)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#else
    return (i32v)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#endif
}

/* Round to the nearest integers, ties to even; what is none, or too large, gives INT32_MIN. */
INLINE i32v nearest_words(f32v x)
{
#if LANES == 16
    return (i32v)_mm512_cvtps_epi32((__m512)x);
#else
    return (i32v)_mm256_cvtps_epi32((__m256)x);
#endif
}

INLINE i32v larger_words(i32v a, i32v b)
{
#if LANES == 16
    return (i32v)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    return (i32v)_mm256_max_epi32((__m256i)a, (__m256i)b);
#endif
}

/* Return the lowest byte of each word. GCC makes scalars of __builtin_convertvector here, and of
 * its opposite. */
INLINE i8v narrow_to_bytes(i32v x)
{
#if LANES == 16
    return (i8v)_mm512_cvtepi32_epi8((__m512i)x);
#else
    const __m256i lowest = _mm256_set1_epi32(0x0c080400);
    __m256i of_halves = _mm256_shuffle_epi8((__m256i)x, lowest);
    __m128i upper = _mm256_extracti128_si256(of_halves, 1);
    __m128i all = _mm_unpacklo_epi32(_mm256_castsi256_si128(of_halves), upper);
    i8v bytes;
    _mm_storel_epi64((__m128i *)&bytes, all);
    return bytes;
#endif
}

/* Store inputs as `splat_quad` loads them: INPUT_BYTES of each; without dot products the sizes of
 * four, then a byte for each of them whose bits are all those of its sign. */
INLINE void store_byte_inputs(int8_t *to, i8v inputs)
{
#if HAS_BYTE_DOTS
    memcpy(to, &inputs, sizeof inputs);
#else
    for (int i = 0; i < LANES; i += 2 * QUAD) {
        __m128i x = _mm_loadl_epi64((const __m128i *)((const char *)&inputs + i));
        __m128i signs = _mm_cmpgt_epi8(_mm_setzero_si128(), x);
        __m128i quads = _mm_unpacklo_epi32(_mm_abs_epi8(x), signs);
        _mm_storeu_si128((__m128i *)(to + i * INPUT_BYTES), quads);
    }
#endif
}

INLINE i32v widen_bytes(i8v x)
{
#if LANES == 16
    return (i32v)_mm512_cvtepi8_epi32((__m128i)x);
#else
    return (i32v)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)&x));
#endif
}

INLINE f32v words_to_floats(i32v x) { return __builtin_convertvector(x, f32v); }

/* Return x as it is, rounded: a sum that it goes into is not fused with the product that it is. */
INLINE f32v as_rounded(f32v x)
{
    __asm__("" : "+v"(x));
    return x;
}

#endif
