/* The recurrence of gated delta nets, row by row.
 *
 * A state is [key features, value features], so that a sum over keys is one in each lane, from the
 * first feature to the last.
 */
#include "recurrent/states.h"

static const float LENGTH_EPS = 1e-6f; /* as kernels/recurrent/gated_delta_rule.py has it */

struct gated_delta_rule {
    const float *qkv, *a, *b;     /* [T, 2 HK DK + HV DV]; [T, HV] each */
    const float *decay, *dt_bias; /* [HV] each */
    float *states;                /* [P, HV, DK, DV] */
    float *out;                   /* [T, HV DV] */
    int64_t qkv_stride, a_stride, b_stride, page_stride;
    int64_t num_key_heads, num_heads, key_dim, value_dim;
};

/* Of the rows of a block: q and k [BLOCK_ROWS, padded key_dim], what is left of a state, and how
 * much of the error is mended. */
struct factors {
    float *q, *k;
    float decay[BLOCK_ROWS], beta[BLOCK_ROWS];
};

INLINE int64_t padded_keys(const struct gated_delta_rule *p) { return round_up(p->key_dim, LANES); }

int64_t topwork_gated_delta_rule_scratch(const void *op)
{
    return 2 * BLOCK_ROWS * padded_keys(op) * (int64_t)sizeof(float);
}

/* Write x divided by its length and times a factor. */
INLINE void store_unit(const float *x, int64_t count, float factor, float *to)
{
    f32v sums = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        f32v part = load_some(x, i, count - i, false);
        sums = multiply_add(part, part, sums);
    }
    float scale = factor / sqrtf(sum_lanes(sums) + LENGTH_EPS);
    for (int64_t i = 0; i < count; i += LANES)
        store_f32(to + i, load_some(x, i, count - i, false) * scale);
}

INLINE void make_factors(const struct gated_delta_rule *p, int64_t head, int64_t first,
                         int64_t num_rows, struct factors *factors)
{
    int64_t key_head = head * p->num_key_heads / p->num_heads, width = padded_keys(p);
    float q_factor = 1.0f / sqrtf((float)p->key_dim);
    for (int64_t i = 0; i < num_rows; i++) {
        int64_t row = first + i;
        const float *q = p->qkv + row * p->qkv_stride + key_head * p->key_dim;
        store_unit(q, p->key_dim, q_factor, factors->q + i * width);
        store_unit(q + p->num_key_heads * p->key_dim, p->key_dim, 1.0f, factors->k + i * width);
        float step = softplus(p->a[row * p->a_stride + head] + p->dt_bias[head]);
        factors->decay[i] = expf(step * p->decay[head]);
        factors->beta[i] = 1.0f / (1.0f + expf(-p->b[row * p->b_stride + head]));
    }
}

/* Add up what `count` columns of a state, decayed, hold for a key. */
INLINE void recall(const float *state, int64_t stride, int64_t num_features, const float *k,
                   float decay, f32v *sums, const int num_vectors, const int64_t count)
{
    for (int64_t n = 0; n < num_features; n++) {
        for (int j = 0; j < num_vectors; j++) {
            f32v kept = load_some(state, j * LANES, count - j * LANES, false) * decay;
            sums[j] = multiply_add(kept, splat(k[n]), sums[j]);
        }
        state += stride;
    }
}

/* Decay the columns, add a key's error, and add up what they then hold for a query. */
INLINE void mend(float *state, int64_t stride, int64_t num_features, const float *k, const float *q,
                 float decay, const f32v *errors, f32v *sums, const int num_vectors,
                 const int64_t count)
{
    for (int64_t n = 0; n < num_features; n++) {
        f32v k_n = splat(k[n]), q_n = splat(q[n]);
        for (int j = 0; j < num_vectors; j++) {
            int64_t at = j * LANES;
            f32v kept = load_some(state, at, count - at, false) * decay;
            f32v now = multiply_add(errors[j], k_n, kept);
            store_some(state, at, count - at, false, now);
            sums[j] = multiply_add(now, q_n, sums[j]);
        }
        state += stride;
    }
}

/* Some columns of a head's state through the rows of a block. */
INLINE void mend_columns(const struct gated_delta_rule *p, int64_t head, int64_t first,
                         int64_t num_rows, const struct factors *factors, float *state,
                         int64_t column, const int num_vectors, const int64_t count)
{
    int64_t values = p->num_heads * p->value_dim, own = head * p->value_dim + column;
    int64_t before_v = 2 * p->num_key_heads * p->key_dim, width = padded_keys(p);
    for (int64_t i = 0; i < num_rows; i++) {
        const float *q = factors->q + i * width, *k = factors->k + i * width;
        const float *v = p->qkv + (first + i) * p->qkv_stride + before_v + own;
        float decay = factors->decay[i];
        f32v errors[TILE_VECTORS], sums[TILE_VECTORS];
        for (int j = 0; j < num_vectors; j++)
            sums[j] = (f32v){0};
        recall(state + column, p->value_dim, p->key_dim, k, decay, sums, num_vectors, count);
        for (int j = 0; j < num_vectors; j++) {
            f32v right = load_some(v, j * LANES, count - j * LANES, false);
            errors[j] = (right - sums[j]) * factors->beta[i];
            sums[j] = (f32v){0};
        }
        mend(state + column, p->value_dim, p->key_dim, k, q, decay, errors, sums, num_vectors,
             count);
        float *out = p->out + (first + i) * values + own;
        for (int j = 0; j < num_vectors; j++)
            store_some(out, j * LANES, count - j * LANES, false, sums[j]);
    }
}

void topwork_gated_delta_rule(const void *op, struct worker *worker)
{
    const struct gated_delta_rule *p = op;
    int64_t size = p->key_dim * p->value_dim, head;
    float *scratch = worker->scratch;
    struct factors factors = {.q = scratch, .k = scratch + BLOCK_ROWS * padded_keys(p)};
    for (const struct state_run *run; (run = take_run(worker, p->num_heads, &head)) != NULL;) {
        float *state = begin_state(p->states, p->page_stride, run, head * size, size);
        for (int64_t row = run->start; row < run->stop; row += BLOCK_ROWS) {
            int64_t num_rows = smaller(run->stop - row, BLOCK_ROWS);
            make_factors(p, head, row, num_rows, &factors);
#define MEND(column, num_vectors, count) \
    mend_columns(p, head, row, num_rows, &factors, state, column, num_vectors, count)
            FOR_TILES_OF_COLUMNS(p->value_dim, MEND);
#undef MEND
        }
    }
}
