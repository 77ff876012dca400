/* The norm and the gate between a recurrence and its output projection. */
#include "rows.h"
#include "simd/sigmoid.h"

struct gated_norm {
    const float *x, *gate; /* [T, W] each */
    const void *weight;    /* [W]; null: only the gate */
    void *out;             /* [T, W] */
    int64_t gate_stride, width, group_size, is_gate_first, is_weight_bf16, is_bf16;
    double eps;
};

int64_t topwork_gated_norm_scratch(const void *op)
{
    const struct gated_norm *p = op;
    return round_up(p->group_size, LANES) * (int64_t)sizeof(float);
}

/* Return whether the gate comes before the norm, or there is no norm. */
INLINE bool gates_first(const struct gated_norm *p)
{
    return p->is_gate_first || p->weight == NULL;
}

INLINE void norm_group(const struct gated_norm *p, int64_t row, int64_t first, float *normed)
{
    int64_t size = p->group_size;
    const float *x = p->x + row * p->width + first, *gate = p->gate + row * p->gate_stride + first;
    char *out = (char *)p->out + (row * p->width + first) * (p->is_bf16 ? 2 : 4);
    for (int64_t i = 0; i < size; i += LANES) {
        f32v part = load_some(x, i, size - i, false);
        if (gates_first(p))
            part *= silu(load_some(gate, i, size - i, false));
        store_f32(normed + i, part);
    }
    float scale = p->weight == NULL ? 1.0f : 1.0f / root_mean_square(normed, size, p->eps);
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
