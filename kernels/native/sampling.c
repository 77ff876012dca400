/* Which tokens of a row can win a draw: those whose score plus noise is near the best.
 *
 * Owns a rough form of the noise, in float32, of the same hash as kernels/sampling.py. It is off by
 * less than MARGIN, so the winner of the exact draw, in float64, is among those found here; Python
 * decides between these few. Knows nothing of temperature or truncation.
 */
#include "vector.h"

typedef uint64_t u64x8 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));

enum {
    WIDTH = 8,
    BLOCK = 256, /* tokens that are looked through only if one of them is near */
};

#define MARGIN 0x1p-10f /* the rough noise is off by less than a fiftieth of it */

struct problem {
    const float *scores; /* [num_tokens] */
    float *sums;         /* [num_tokens]: score plus rough noise, for this call's use */
    int64_t *ids;        /* [capacity]: what was found, ascending */
    int64_t num_tokens, capacity;
    uint64_t stream;
    int64_t num_found; /* may be more than capacity; then ids has the first of them */
};

INLINE f32x8 choose(i32x8 mask, f32x8 yes, f32x8 no)
{
    return (f32x8)((mask & (i32x8)yes) | (~mask & (i32x8)no));
}

/* 2 atanh(s) for |s| < 0.18, which is log((1 + s) / (1 - s)). */
INLINE f32x8 twice_atanh(f32x8 s)
{
    f32x8 square = s * s;
    f32x8 p = square * (1.0f / 9) + 1.0f / 7;
    p = p * square + 1.0f / 5;
    p = p * square + 1.0f / 3;
    p = p * square + 1.0f;
    return 2.0f * s * p;
}

/* log(x) of positive normal numbers: x = 2^n m with m from sqrt(1/2) to sqrt(2). */
INLINE f32x8 log_positive(f32x8 x)
{
    i32x8 bits = (i32x8)x - 0x3f3504f3; /* sqrt(1/2) */
    i32x8 n = bits >> 23;
    f32x8 m = (f32x8)((bits & 0x7fffff) + 0x3f3504f3);
    return __builtin_convertvector(n, f32x8) * 0.693147181f + twice_atanh((m - 1.0f) / (m + 1.0f));
}

/* -log(-log(u)), u = (2 k + 1) / 2^53 for the upper 52 bits k of a hash. */
INLINE f32x8 rough_noise(u64x8 hash)
{
    u64x8 odd = (hash >> 12) * 2 + 1;
    f32x8 u = __builtin_convertvector(odd, f32x8) * 0x1p-53f;
    /* Near 1 float32 has no room for u, but for what is missing. */
    f32x8 rest = __builtin_convertvector((1ull << 53) - odd, f32x8) * 0x1p-53f;
    f32x8 is_near = choose(rest < 0.25f, rest, (f32x8){0} + 0.25f);
    f32x8 near = twice_atanh(is_near / (2.0f - is_near));
    f32x8 exponential = choose(rest < 0.25f, near, -log_positive(u));
    return -log_positive(exponential);
}

INLINE u64x8 hash_tokens(u64x8 id, uint64_t stream)
{
    u64x8 x = (id + 1) * 0x9e3779b97f4a7c15ull + stream;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

INLINE f32x8 larger(f32x8 a, f32x8 b) { return choose(a > b, a, b); }

INLINE float largest(f32x8 x)
{
    float best = x[0];
    for (int i = 1; i < WIDTH; i++)
        best = x[i] > best ? x[i] : best;
    return best;
}

int topwork_near_best(struct problem *p)
{
    const float nothing = -__builtin_inff();
    u64x8 id = {0, 1, 2, 3, 4, 5, 6, 7};
    f32x8 best = nothing - (f32x8){0};
    for (int64_t first = 0; first < p->num_tokens; first += WIDTH, id += WIDTH) {
        size_t size = (size_t)smaller(WIDTH, p->num_tokens - first) * sizeof(float);
        f32x8 sums = nothing - (f32x8){0};
        memcpy(&sums, p->scores + first, size);
        sums += rough_noise(hash_tokens(id, p->stream));
        memcpy(p->sums + first, &sums, size);
        best = larger(sums, best);
    }
    float least = largest(best) - 2 * MARGIN;
    p->num_found = 0;
    for (int64_t first = 0; first < p->num_tokens; first += BLOCK) {
        int64_t end = smaller(first + BLOCK, p->num_tokens);
        int is_any = 0;
        for (int64_t i = first; i < end; i++)
            is_any |= p->sums[i] >= least;
        for (int64_t i = first; is_any && i < end; i++)
            if (p->sums[i] >= least) {
                if (p->num_found < p->capacity)
                    p->ids[p->num_found] = i;
                p->num_found++;
            }
    }
    return 0;
}
