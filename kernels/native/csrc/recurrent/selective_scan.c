/* Mamba-2's recurrence, row by row.
 *
 * A state is [state features, head features], so that a sum over the state is one in each lane,
 * from the first feature to the last.
 */
#include "recurrent/states.h"

struct selective_scan {
    const float *xbc, *dt;        /* [T, H D + 2 G N]: x, b and c; [T, H] */
    const float *a, *dt_bias, *d; /* [H] each */
    float *states;                /* [P, H, N, D] */
    float *out;                   /* [T, H D] */
    int64_t xbc_stride, dt_stride, page_stride;
    int64_t num_heads, num_groups, state_size, head_dim;
    double dt_min, dt_max;
};

/* Of the rows of a block: the time step and what it leaves of a state. */
struct factors {
    float step[BLOCK_ROWS], decay[BLOCK_ROWS];
};

int64_t topwork_selective_scan_scratch(const void *op)
{
    (void)op;
    return 0;
}

INLINE struct factors make_factors(const struct selective_scan *p, int64_t head, int64_t first,
                                   int64_t num_rows)
{
    struct factors factors;
    for (int64_t i = 0; i < num_rows; i++) {
        float step = softplus(p->dt[(first + i) * p->dt_stride + head] + p->dt_bias[head]);
        /* A NaN stays one. */
        step = step < (float)p->dt_min ? (float)p->dt_min : step;
        step = step > (float)p->dt_max ? (float)p->dt_max : step;
        factors.step[i] = step;
        factors.decay[i] = expf(step * p->a[head]);
    }
    return factors;
}

/* One row: `count` columns of a head's state go on by b and what comes in, scaled; return the sums
 * of c times each. */
INLINE void scan_row(float *state, int64_t stride, int64_t num_features, const float *b,
                     const float *c, float decay, const f32v *scaled, f32v *sums,
                     const int num_vectors, const int64_t count)
{
    for (int64_t n = 0; n < num_features; n++) {
        f32v b_n = splat(b[n]), c_n = splat(c[n]);
        for (int j = 0; j < num_vectors; j++) {
            int64_t at = j * LANES;
            f32v kept = load_some(state, at, count - at, false) * decay;
            f32v now = multiply_add(scaled[j], b_n, kept);
            store_some(state, at, count - at, false, now);
            sums[j] = multiply_add(now, c_n, sums[j]);
        }
        state += stride;
    }
}

/* Some columns of a head's state through the rows of a block. */
INLINE void scan_columns(const struct selective_scan *p, int64_t head, int64_t first,
                         int64_t num_rows, const struct factors *factors, float *state,
                         int64_t column, const int num_vectors, const int64_t count)
{
    int64_t inner = p->num_heads * p->head_dim, own = head * p->head_dim + column;
    int64_t group = head * p->num_groups / p->num_heads;
    for (int64_t i = 0; i < num_rows; i++) {
        const float *of_row = p->xbc + (first + i) * p->xbc_stride, *x = of_row + own;
        const float *b = of_row + inner + group * p->state_size;
        const float *c = b + p->num_groups * p->state_size;
        f32v scaled[TILE_VECTORS], sums[TILE_VECTORS];
        for (int j = 0; j < num_vectors; j++) {
            scaled[j] = load_some(x, j * LANES, count - j * LANES, false) * factors->step[i];
            sums[j] = (f32v){0};
        }
        scan_row(state + column, p->head_dim, p->state_size, b, c, factors->decay[i], scaled, sums,
                 num_vectors, count);
        float *out = p->out + (first + i) * inner + own;
        for (int j = 0; j < num_vectors; j++) {
            f32v passed = load_some(x, j * LANES, count - j * LANES, false);
            passed = multiply_add(passed, splat(p->d[head]), sums[j]);
            store_some(out, j * LANES, count - j * LANES, false, passed);
        }
    }
}

void topwork_selective_scan(const void *op, struct worker *worker)
{
    const struct selective_scan *p = op;
    int64_t size = p->state_size * p->head_dim, head;
    for (const struct state_run *run; (run = take_run(worker, p->num_heads, &head)) != NULL;) {
        float *state = begin_state(p->states, p->page_stride, run, head * size, size);
        for (int64_t row = run->start; row < run->stop; row += BLOCK_ROWS) {
            int64_t num_rows = smaller(run->stop - row, BLOCK_ROWS);
            struct factors factors = make_factors(p, head, row, num_rows);
#define SCAN(column, num_vectors, count) \
    scan_columns(p, head, row, num_rows, &factors, state, column, num_vectors, count)
            FOR_TILES_OF_COLUMNS(p->head_dim, SCAN);
#undef SCAN
        }
    }
}
