/* Which experts a row goes to, and where the pairs of a row and one of its experts stand.
 *
 * A row's choice depends on its own logits alone. Pairs stand by expert and those of an expert by
 * row: one thread counts them, for a step has a few thousand at most.
 */
#include "runtime/thread_pool.h"
#include "simd/vector.h"

struct route {
    const float *logits; /* [T, num_logits], rows stride apart */
    int64_t *experts;    /* [T, top_k], the best first */
    float *weights;      /* [T, top_k] */
    int64_t num_logits, stride, top_k, is_renormalized;
};

int64_t topwork_route_scratch(const void *op)
{
    const struct route *p = op;
    return round_up(p->num_logits, LANES) * (int64_t)sizeof(float);
}

/* Tell whether an expert is better than another: NaN is the largest, the lower of equals better. */
INLINE bool is_better(const float *logits, int64_t one, int64_t other)
{
    float x = logits[one], y = logits[other];
    bool is_nan = x != x, is_other_nan = y != y;
    if (is_nan || is_other_nan)
        return is_nan && (!is_other_nan || one < other);
    return x > y || (x == y && one < other);
}

/* Return the best of the experts that are not as good as `last`, or of all if that is -1. */
static int64_t best_behind(const float *logits, int64_t count, int64_t last)
{
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if ((last < 0 || is_better(logits, last, i)) && (best < 0 || is_better(logits, i, best)))
            best = i;
    return best;
}

static void route_row(const struct route *p, const float *logits, int64_t *experts, float *weights,
                      float *terms)
{
    int64_t last = -1;
    for (int64_t i = 0; i < p->top_k; i++)
        experts[i] = last = best_behind(logits, p->num_logits, last);
    for (int64_t i = 0; i < p->num_logits; i += LANES) {
        f32v x = load_some(logits, i, p->num_logits - i, false);
        store_f32(terms + i, exp_nonpositive(x - logits[experts[0]]));
    }
    float total = 0;
    if (p->is_renormalized)
        for (int64_t i = 0; i < p->top_k; i++)
            total += terms[experts[i]];
    else
        for (int64_t i = 0; i < p->num_logits; i++)
            total += terms[i];
    for (int64_t i = 0; i < p->top_k; i++)
        weights[i] = terms[experts[i]] / total;
}

void topwork_route(const void *op, struct worker *worker)
{
    const struct route *p = op;
    for (int64_t row; (row = take_task(worker, worker->step->num_rows)) >= 0;)
        route_row(p, p->logits + row * p->stride, p->experts + row * p->top_k,
                  p->weights + row * p->top_k, worker->scratch);
}

struct sort_pairs {
    const int64_t *experts;    /* [T, top_k], among those of all ranks */
    int64_t *positions, *rows; /* [T, top_k]; [T top_k] */
    int64_t *starts;           /* [num_experts + 1] */
    int64_t top_k;
    int64_t num_experts, first_expert; /* of this rank */
};

int64_t topwork_sort_pairs_scratch(const void *op)
{
    const struct sort_pairs *p = op;
    return (p->num_experts + 1) * (int64_t)sizeof(int64_t);
}

/* Return an expert's number on this rank; those of other ranks have the one behind the last. */
INLINE int64_t own_number(const struct sort_pairs *p, int64_t expert)
{
    int64_t own = expert - p->first_expert;
    return own < 0 || own >= p->num_experts ? p->num_experts : own;
}

void topwork_sort_pairs(const void *op, struct worker *worker)
{
    const struct sort_pairs *p = op;
    if (take_task(worker, 1) < 0)
        return;
    int64_t num_pairs = worker->step->num_rows * p->top_k, num_before = 0;
    int64_t *next = worker->scratch; /* [num_experts + 1]: counts, then where the next pair goes */
    memset(next, 0, (size_t)(p->num_experts + 1) * sizeof *next);
    for (int64_t pair = 0; pair < num_pairs; pair++)
        next[own_number(p, p->experts[pair])]++;
    for (int64_t i = 0; i <= p->num_experts; i++) {
        int64_t count = next[i];
        next[i] = p->starts[i] = num_before;
        num_before += count;
    }
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        int64_t at = next[own_number(p, p->experts[pair])]++;
        p->positions[pair] = at;
        p->rows[at] = pair / p->top_k;
    }
}
