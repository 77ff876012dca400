/* VNNI's dot product of bytes for a CPU that has none: what it does, an instruction at a time.
 *
 * Source: Intel's intrinsics guide, _mm256_dpbusd_avx_epi32.
 */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32 emulated_dots

static inline __m256i emulated_dots(__m256i sums, __m256i a, __m256i b)
{
    uint32_t words[8];
    uint8_t unsigned_bytes[32];
    int8_t signed_bytes[32];
    memcpy(words, &sums, sizeof words);
    memcpy(unsigned_bytes, &a, sizeof unsigned_bytes);
    memcpy(signed_bytes, &b, sizeof signed_bytes);
    for (int i = 0; i < 32; i++)
        words[i / 4] += (uint32_t)(unsigned_bytes[i] * signed_bytes[i]);
    memcpy(&sums, words, sizeof words);
    return sums;
}
