/* Which tokens of a row can win a draw: those whose score plus noise is near the best.
 *
 * A rough form of the noise, in float32, of the same hash as kernels/gumbel_noise.py. It is off by
 * less than MARGIN, so the winner of the exact draw, in float64, is among those found here; Python
 * decides between these few.
 */
#include "simd/vector.h"

enum {
    HALF = LANES / 2,
    BLOCK = 256, /* tokens that are looked through only if one of them is near */
};

#define MARGIN 0x1p-10f /* the rough noise is off by less than a fiftieth of it */

struct search {
    const float *scores; /* [num_tokens] */
    float *sums;         /* [num_tokens]: score plus rough noise, for this call's use */
    int64_t *ids;        /* [capacity]: what was found, ascending */
    int64_t num_tokens, capacity;
    uint64_t stream;
    int64_t num_candidates; /* may be more than capacity; then ids has the first of them */
};

/* 2 atanh(s) for |s| < 0.18, which is log((1 + s) / (1 - s)). */
INLINE f32v twice_atanh(f32v s)
{
    f32v square = s * s;
    f32v p = square * (1.0f / 9) + 1.0f / 7;
    p = p * square + 1.0f / 5;
    p = p * square + 1.0f / 3;
    p = p * square + 1.0f;
    return 2.0f * s * p;
}

/* log(x) of positive normal numbers: x = 2^n m with m from sqrt(1/2) to sqrt(2). */
INLINE f32v log_positive(f32v x)
{
    i32v bits = (i32v)x - 0x3f3504f3; /* sqrt(1/2) */
    i32v n = bits >> 23;
    f32v m = (f32v)((bits & 0x7fffff) + 0x3f3504f3);
    return __builtin_convertvector(n, f32v) * 0.693147181f + twice_atanh((m - 1.0f) / (m + 1.0f));
}

/* u = (2 k + 1) / 2^53 for the upper 52 bits k of a hash, exactly: 1 + k / 2^52 has k's bits. */
INLINE f64v uniform(u64v hash)
{
    return (f64v)(hash >> 12 | 0x3ff0000000000000ull) - (1 - 0x1p-53);
}

/* -log(-log(u)) */
INLINE f32v rough_noise(f64v u_first, f64v u_last)
{
    f32v u = to_floats(u_first, u_last);
    /* Near 1 float32 has no room for u, but for what is missing. */
    f32v rest = to_floats(1.0 - u_first, 1.0 - u_last);
    f32v is_near = select_lanes(rest < 0.25f, rest, splat(0.25f));
    f32v near = twice_atanh(is_near / (2.0f - is_near));
    f32v exponential = select_lanes(rest < 0.25f, near, -log_positive(u));
    return -log_positive(exponential);
}

INLINE u64v hash_tokens(u64v id, uint64_t stream)
{
    u64v x = (id + 1) * 0x9e3779b97f4a7c15ull + stream;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

int topwork_gumbel_candidates(struct search *p)
{
    f32v best = splat(-__builtin_inff());
    u64v id;
    for (int i = 0; i < HALF; i++)
        id[i] = (uint64_t)i;
    for (int64_t first = 0; first < p->num_tokens; first += LANES, id += LANES) {
        int64_t count = p->num_tokens - first;
        f32v sums = load_some(p->scores, first, count, false);
        sums += rough_noise(uniform(hash_tokens(id, p->stream)),
                            uniform(hash_tokens(id + HALF, p->stream)));
        store_some(p->sums, first, count, false, sums);
        if (count < LANES)
            sums = select_lanes(lane_numbers() < (int32_t)count, sums, best);
        best = select_lanes(sums > best, sums, best);
    }
    float least = largest_lane(best) - 2 * MARGIN;
    p->num_candidates = 0;
    for (int64_t first = 0; first < p->num_tokens; first += BLOCK) {
        int64_t end = smaller(first + BLOCK, p->num_tokens);
        int is_any = 0;
        for (int64_t i = first; i < end; i++)
            is_any |= p->sums[i] >= least;
        for (int64_t i = first; is_any && i < end; i++)
            if (p->sums[i] >= least) {
                if (p->num_candidates < p->capacity)
                    p->ids[p->num_candidates] = i;
                p->num_candidates++;
            }
    }
    return 0;
}
