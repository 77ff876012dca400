/* Weights of bfloat16 in 12 bits, not one bit lost.
 *
 * The upper byte of a bfloat16 is its sign and seven bits of its exponent, of which trained weights
 * use few (DFloat11, arXiv 2504.11651, finds 2.6 bits of entropy in an exponent): a panel names the
 * 16 upper bytes that it has most of in a table, and keeps four bits for each weight beside its
 * lower byte as it is. Words with another upper byte, the outliers, stand in a list. What is
 * multiplied is the same word as of a plain panel, in the same order, so a product has the same
 * bits.
 *
 * A group is two steps of a panel, 4 inputs of 32 outputs: 64 lower bytes of the first step, 64 of
 * the second, and 64 bytes whose lower halves are the codes of the first step, and whose upper
 * halves are those of the second.
 */
#ifndef TOPWORK_LINEAR_EXPONENT_CODING_H
#define TOPWORK_LINEAR_EXPONENT_CODING_H

#include "simd/words.h"

enum {
    GROUP_STEPS = 2,
    GROUP_WORDS = 64, /* of two bfloat16: first step, outputs 0 to 31, then second step */
    GROUP_VECTORS = GROUP_WORDS / LANES,
    GROUP_BYTES = 192,
    NUM_CODES = 16,
};

/* A word that the table cannot tell. */
struct outlier {
    int32_t place; /* GROUP_WORDS group + word */
    uint32_t word;
};

struct coded_panel {
    const uint8_t *groups; /* [groups, GROUP_BYTES] */
    const uint8_t *table;  /* [NUM_CODES]: upper bytes */
    const struct outlier *outliers;
    int64_t num_outliers; /* in the order of their places */
};

/* Return where the two bytes of a step's word stand among the step's 64: in each quarter of a
 * register the bytes of four words of outputs 0 to 15, then of four of outputs 16 to 31. */
INLINE int64_t byte_of_word(int64_t word)
{
    return word % 16 / 4 * 16 + word / 16 * 8 + word % 4 * 2;
}

#if LANES == 16

typedef __m512i code_table;

INLINE code_table load_table(const uint8_t *table)
{
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
}

/* Return the upper bytes of 64 codes in the lower halves of bytes. */
INLINE __m512i look_up(__m512i codes, code_table table)
{
#if defined(__AVX512VBMI__) /* looks at six bits, and the table stands there four times */
    return _mm512_permutexvar_epi8(codes, table);
#else
    return _mm512_shuffle_epi8(table, _mm512_and_si512(codes, _mm512_set1_epi8(15)));
#endif
}

/* Give the words of a group but for those in the list: the first step's by output, then the
 * second's. */
INLINE void load_group(const uint8_t *group, code_table table, u32v words[GROUP_VECTORS])
{
    __m512i codes = _mm512_loadu_si512(group + 128);
    for (int step = 0; step < GROUP_STEPS; step++) {
        __m512i lower = _mm512_loadu_si512(group + 64 * step);
        __m512i upper = look_up(step == 0 ? codes : _mm512_srli_epi16(codes, 4), table);
        words[2 * step] = (u32v)_mm512_unpacklo_epi8(lower, upper);
        words[2 * step + 1] = (u32v)_mm512_unpackhi_epi8(lower, upper);
    }
}

#else

typedef __m256i code_table;

INLINE code_table load_table(const uint8_t *table)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
}

INLINE __m256i load_bytes(const uint8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }

/* The same, where two quarters of a step's bytes are a register. */
INLINE void load_group(const uint8_t *group, code_table table, u32v words[GROUP_VECTORS])
{
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        __m256i codes = load_bytes(group + 128 + 32 * half);
#pragma GCC unroll 2
        for (int step = 0; step < GROUP_STEPS; step++) {
            __m256i lower = load_bytes(group + 64 * step + 32 * half);
            __m256i own = _mm256_and_si256(step == 0 ? codes : _mm256_srli_epi16(codes, 4),
                                           _mm256_set1_epi8(15));
            __m256i upper = _mm256_shuffle_epi8(table, own);
            words[4 * step + half] = (u32v)_mm256_unpacklo_epi8(lower, upper);
            words[4 * step + 2 + half] = (u32v)_mm256_unpackhi_epi8(lower, upper);
        }
    }
}

#endif

/* Put the words of the list into their group; return the first that is of another one. */
INLINE const struct outlier *patch_group(const struct outlier *outlier, const struct outlier *end,
                                         int64_t group, u32v words[GROUP_VECTORS])
{
    uint32_t all[GROUP_WORDS] __attribute__((aligned(64)));
    memcpy(all, words, sizeof all);
    for (; outlier < end && outlier->place / GROUP_WORDS == group; outlier++)
        all[outlier->place % GROUP_WORDS] = outlier->word;
    memcpy(words, all, sizeof all);
    return outlier;
}

#endif
