/* The norm and the gate between a recurrence and its output projection, and the sums that ranks
 * add up first where a norm goes over features of all of them. */
#include "rows.h"
#include "simd/sigmoid.h"

struct gated_norm {        /* of both ops */
    const float *x, *gate; /* [T, W] each */
    float *sums;           /* [T]: squares, written by gated_squares; null: a group's are its own */
    const void *weight;    /* [W]; null: only the gate */
    void *out;             /* [T, W] */
    int64_t gate_stride, width, group_size, all_width; /* of all ranks */
    int64_t is_gate_first, is_weight_bf16, is_bf16;
    double eps;
};

int64_t topwork_gated_norm_scratch(const void *op)
{
    const struct gated_norm *p = op;
    return round_up(p->group_size, LANES) * (int64_t)sizeof(float);
}

/* Return whether what is normed is gated already, as it is where there is no norm. */
INLINE bool gates_first(const struct gated_norm *p) { return p->is_gate_first; }

/* Write what is normed of a row's features [first, first + count). */
INLINE void gate_some(const struct gated_norm *p, int64_t row, int64_t first, int64_t count,
                      float *to)
{
    const float *x = p->x + row * p->width + first, *gate = p->gate + row * p->gate_stride + first;
    for (int64_t i = 0; i < count; i += LANES) {
        f32v part = load_some(x, i, count - i, false);
        if (gates_first(p))
            part *= silu(load_some(gate, i, count - i, false));
        store_f32(to + i, part);
    }
}

INLINE float mean_square(const struct gated_norm *p, int64_t row, const float *normed)
{
    if (p->sums != NULL)
        return p->sums[row] / (float)p->all_width;
    return sum_of_squares(normed, p->group_size) / (float)p->group_size;
}

INLINE void norm_group(const struct gated_norm *p, int64_t row, int64_t first, float *normed)
{
    int64_t size = p->group_size;
    const float *gate = p->gate + row * p->gate_stride + first;
    char *out = (char *)p->out + (row * p->width + first) * (p->is_bf16 ? 2 : 4);
    gate_some(p, row, first, size, normed);
    float scale = 1.0f;
    if (p->weight != NULL)
        scale /= sqrtf(mean_square(p, row, normed) + (float)p->eps);
    for (int64_t i = 0; i < size; i += LANES) {
        f32v part = load_f32(normed + i) * scale;
        if (p->weight != NULL)
            part *= load_some(p->weight, first + i, size - i, p->is_weight_bf16);
        if (!gates_first(p))
            part *= silu(load_some(gate, i, size - i, false));
        store_some(out, i, size - i, p->is_bf16, part);
    }
}

void topwork_gated_norm(const void *op, struct worker *worker)
{
    const struct gated_norm *p = op;
    FOR_ROWS_TAKEN(worker, row, p->width) {
        for (int64_t first = 0; first < p->width; first += p->group_size)
            norm_group(p, row, first, worker->scratch);
    }
}

int64_t topwork_gated_squares_scratch(const void *op)
{
    const struct gated_norm *p = op;
    return round_up(p->width, LANES) * (int64_t)sizeof(float);
}

void topwork_gated_squares(const void *op, struct worker *worker)
{
    const struct gated_norm *p = op;
    FOR_ROWS_TAKEN(worker, row, p->width) {
        gate_some(p, row, 0, p->width, worker->scratch);
        p->sums[row] = sum_of_squares(worker->scratch, p->width);
    }
}
