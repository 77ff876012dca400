/* Rows brought into the order of the pairs that route.c has sorted, and back.
 *
 * A row's sum is made from what it starts with and its best expert to its last, one fused
 * multiply-add after the other, wherever their pairs stand.
 */
#include "runtime/thread_pool.h"
#include "simd/sigmoid.h"
#include "simd/vector.h"

struct permute {
    const char *x; /* [T, K] of row_size bytes, x_size bytes apart */
    const int64_t *rows;
    const int64_t *end; /* of this rank's pairs */
    char *out;          /* [T top_k, K] */
    int64_t x_size, row_size;
};

int64_t topwork_permute_scratch(const void *op)
{
    (void)op;
    return 0;
}

void topwork_permute(const void *op, struct worker *worker)
{
    const struct permute *p = op;
    for (int64_t pair; (pair = take_task(worker, *p->end)) >= 0;)
        memcpy(p->out + pair * p->row_size, p->x + p->rows[pair] * p->x_size, (size_t)p->row_size);
}

struct unpermute {
    const float *y;           /* [T top_k, N] */
    const float *weights;     /* [T, top_k] */
    const int64_t *positions; /* [T, top_k] */
    const int64_t *end;       /* of this rank's pairs */
    const float *start;       /* [T, N]; null: nothing */
    const float *gates;       /* [T], gate_stride apart, of what it starts with; null: open */
    float *out;               /* [T, N] */
    int64_t top_k, width, gate_stride;
};

int64_t topwork_unpermute_scratch(const void *op)
{
    (void)op;
    return 0;
}

void topwork_unpermute(const void *op, struct worker *worker)
{
    const struct unpermute *p = op;
    for (int64_t row; (row = take_task(worker, worker->step->num_rows)) >= 0;) {
        const float *weights = p->weights + row * p->top_k;
        const int64_t *positions = p->positions + row * p->top_k;
        for (int64_t i = 0; i < p->width; i += LANES) {
            f32v sum = {0};
            if (p->start)
                sum = load_some(p->start + row * p->width, i, p->width - i, false);
            if (p->gates)
                sum = times_sigmoid(sum, splat(p->gates[row * p->gate_stride]));
            for (int64_t j = 0; j < p->top_k; j++) {
                if (positions[j] >= *p->end)
                    continue;
                const float *y = p->y + positions[j] * p->width;
                f32v part = load_some(y, i, p->width - i, false);
                sum = multiply_add(splat(weights[j]), part, sum);
            }
            store_some(p->out + row * p->width, i, p->width - i, false, sum);
        }
    }
}

struct pair_runs {
    const int64_t *rows, *starts; /* as route.c sorts pairs */
    struct run *runs;             /* [T top_k] */
    int64_t *num_runs;
    int64_t num_experts;
};

int64_t topwork_pair_runs_scratch(const void *op)
{
    (void)op;
    return 0;
}

/* Write the runs of pairs of one expert and one adapter. Their slots count experts of slots. */
void topwork_pair_runs(const void *op, struct worker *worker)
{
    const struct pair_runs *p = op;
    const struct run *end = worker->step->runs + worker->step->num_runs;
    if (take_task(worker, 1) < 0)
        return;
    struct run *to = p->runs;
    for (int64_t expert = 0; expert < p->num_experts; expert++) {
        int64_t pair = p->starts[expert], last = p->starts[expert + 1];
        for (const struct run *run = worker->step->runs; run < end && pair < last; run++) {
            while (pair < last && p->rows[pair] < run->start)
                pair++;
            int64_t first = pair;
            while (pair < last && p->rows[pair] < run->stop)
                pair++;
            if (first < pair)
                *to++ = (struct run){run->slot * p->num_experts + expert, first, pair};
        }
    }
    *p->num_runs = to - p->runs;
}
