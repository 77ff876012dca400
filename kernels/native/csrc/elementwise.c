/* The small ops between the matrix products: norms, rotation with the KV write, gated activations,
 * and the choice of the rows that are sampled.
 *
 * Owns where each of them rounds: once, when it stores. Knows nothing of layers or of which rank
 * holds what.
 */
#include "attention/int8_rows.h"
#include "rows.h"
#include "simd/sigmoid.h"

struct add_rms_norm {
    const float *x, *residual; /* [T, H]; residual may be null */
    const void *weight;        /* [H]; null: out is the sum itself */
    float *total;              /* [T, H]: x + residual; null: there is no residual, x is the sum */
    void *out;                 /* [T, H] */
    int64_t width, is_bf16, is_weight_bf16;
    double eps;
};

int64_t topwork_add_rms_norm_scratch(const void *op)
{
    (void)op;
    return 0;
}

void topwork_add_rms_norm(const void *op, struct worker *worker)
{
    const struct add_rms_norm *p = op;
    FOR_ROWS_TAKEN(worker, row, p->width) {
        const float *x = p->x + row * p->width;
        char *out = (char *)p->out + row * p->width * (p->is_bf16 ? 2 : 4);
        if (p->total != NULL) {
            float *total = p->total + row * p->width;
            for (int64_t i = 0; i < p->width; i += LANES) {
                f32v sum = load_some(x, i, p->width - i, false);
                if (p->residual != NULL)
                    sum += load_some(p->residual + row * p->width, i, p->width - i, false);
                store_some(total, i, p->width - i, false, sum);
            }
            x = total;
        }
        if (p->weight == NULL) {
            for (int64_t i = 0; i < p->width; i += LANES)
                store_some(out, i, p->width - i, p->is_bf16, load_some(x, i, p->width - i, false));
        } else {
            float scale = 1.0f / root_mean_square(x, p->width, p->eps);
            store_scaled(x, scale, p->weight, p->is_weight_bf16, p->width, out, p->is_bf16);
        }
    }
}

struct rope_and_write {
    const float *qkv, *cos, *sin; /* [T, HQ + 2 HK, D], [M, R / 2], [M, R / 2] */
    const void *q_norm, *k_norm;  /* [D], or null */
    void *k_pages, *v_pages, *q;  /* [P, HK, page, D], twice; [T, HQ, D] */
    int64_t qkv_stride;           /* floats from one row to the next */
    int64_t num_heads, num_kv_heads, head_dim, rotary_dim, page_size, is_bf16, is_norm_bf16;
    int64_t is_int8; /* K and V in their pages, as int8_rows.h has it */
    double eps;
};

int64_t topwork_rope_and_write_scratch(const void *op)
{
    const struct rope_and_write *p = op;
    return 2 * p->head_dim * (int64_t)sizeof(float);
}

/* Return x as Hugging Face has cosines and sines: rounded to the served dtype. */
INLINE f32v rounded(f32v x, bool is_bf16) { return is_bf16 ? widen(narrow(x)) : x; }

/* Rotate the two halves of a head's first R features, after its norm if it has one, and store it in
 * float32 or bfloat16.
 */
INLINE void rotate(const struct rope_and_write *p, const float *x, const void *weight,
                   int64_t position, float *normed, void *to, bool is_bf16)
{
    int64_t half = p->rotary_dim / 2, size = is_bf16 ? 2 : 4;
    if (weight != NULL) {
        float scale = 1.0f / root_mean_square(x, p->head_dim, p->eps);
        store_scaled(x, scale, weight, p->is_norm_bf16, p->head_dim, normed, false);
        x = normed;
    }
    for (int64_t i = 0; i < half; i += LANES) {
        f32v cos = rounded(load_some(p->cos + position * half, i, half - i, false), p->is_bf16);
        f32v sin = rounded(load_some(p->sin + position * half, i, half - i, false), p->is_bf16);
        f32v left = load_some(x, i, half - i, false);
        f32v right = load_some(x + half, i, half - i, false);
        store_some(to, i, half - i, is_bf16, left * cos - right * sin);
        store_some((char *)to + half * size, i, half - i, is_bf16, right * cos + left * sin);
    }
    int64_t rest = p->head_dim - p->rotary_dim;
    for (int64_t i = 0; i < rest; i += LANES)
        store_some((char *)to + p->rotary_dim * size, i, rest - i, is_bf16,
                   load_some(x + p->rotary_dim, i, rest - i, false));
}

/* Write a head's K and V to their rows of a page. */
INLINE void write_kv(const struct rope_and_write *p, const float *k, const float *v,
                     int64_t position, float *scratch, char *k_row, char *v_row)
{
    int64_t dim = p->head_dim;
    if (p->is_int8) {
        rotate(p, k, p->k_norm, position, scratch, scratch + dim, false);
        store_int8_row(scratch + dim, dim, k_row);
        store_int8_row(v, dim, v_row);
        return;
    }
    rotate(p, k, p->k_norm, position, scratch, k_row, p->is_bf16);
    for (int64_t d = 0; d < dim; d += LANES)
        store_some(v_row, d, dim - d, p->is_bf16, load_some(v, d, dim - d, false));
}

void topwork_rope_and_write(const void *op, struct worker *worker)
{
    const struct rope_and_write *p = op;
    int64_t num_all = p->num_heads + 2 * p->num_kv_heads, dim = p->head_dim;
    int64_t head_size = dim * (p->is_bf16 ? 2 : 4);
    int64_t row_size = p->is_int8 ? dim + SCALE_BYTES : head_size;
    FOR_ROWS_TAKEN(worker, row, num_all * dim) {
        const float *heads = p->qkv + row * p->qkv_stride;
        int64_t position = worker->step->positions[row], place = worker->step->kv_loc[row];
        char *q = (char *)p->q + row * p->num_heads * head_size;
        for (int64_t i = 0; i < p->num_heads; i++)
            rotate(p, heads + i * dim, p->q_norm, position, worker->scratch, q + i * head_size,
                   p->is_bf16);
        const float *k = heads + p->num_heads * dim, *v = k + p->num_kv_heads * dim;
        for (int64_t i = 0; i < p->num_kv_heads; i++) {
            int64_t page = place / p->page_size * p->num_kv_heads + i;
            int64_t at = (page * p->page_size + place % p->page_size) * row_size;
            write_kv(p, k + i * dim, v + i * dim, position, worker->scratch,
                     (char *)p->k_pages + at, (char *)p->v_pages + at);
        }
    }
}

struct gate {                       /* of silu_and_mul, gelu_tanh_and_mul and swigluoai_and_mul */
    const float *gate_up;           /* [T, 2 I], the gate first */
    void *out;                      /* [T, I] */
    int64_t stride, width, is_bf16; /* numbers from one row of gate_up to the next; I */
    double alpha, limit;            /* of swigluoai_and_mul */
};

INLINE void gate_and_mul(const struct gate *p, struct worker *worker, bool is_gelu)
{
    FOR_ROWS_TAKEN(worker, row, p->width) {
        const float *gate = p->gate_up + row * p->stride, *up = gate + p->width;
        char *out = (char *)p->out + row * p->width * (p->is_bf16 ? 2 : 4);
        store_gated(gate, up, p->width, is_gelu, out, p->is_bf16);
    }
}

int64_t topwork_silu_and_mul_scratch(const void *op)
{
    (void)op;
    return 0;
}

void topwork_silu_and_mul(const void *op, struct worker *worker)
{
    gate_and_mul(op, worker, false);
}

int64_t topwork_gelu_tanh_and_mul_scratch(const void *op)
{
    (void)op;
    return 0;
}

void topwork_gelu_tanh_and_mul(const void *op, struct worker *worker)
{
    gate_and_mul(op, worker, true);
}

int64_t topwork_swigluoai_and_mul_scratch(const void *op)
{
    (void)op;
    return 0;
}

void topwork_swigluoai_and_mul(const void *op, struct worker *worker)
{
    const struct gate *p = op;
    float alpha = (float)p->alpha, limit = (float)p->limit;
    FOR_ROWS_TAKEN(worker, row, p->width) {
        const float *gates = p->gate_up + row * p->stride, *ups = gates + p->width;
        char *out = (char *)p->out + row * p->width * (p->is_bf16 ? 2 : 4);
        for (int64_t i = 0; i < p->width; i += LANES) {
            f32v gate = load_some(gates, i, p->width - i, false);
            f32v up = load_some(ups, i, p->width - i, false);
            gate = select_lanes(gate > limit, splat(limit), gate);
            up = select_lanes(up > limit, splat(limit), up);
            up = select_lanes(up < -limit, splat(-limit), up);
            store_some(out, i, p->width - i, p->is_bf16,
                       times_sigmoid(gate, gate * alpha) * (up + 1.0f));
        }
    }
}

struct gate_heads {
    void *x;            /* [T, I], changed in place */
    const float *gates; /* [T, I] */
    int64_t gates_stride, width, is_bf16;
};

int64_t topwork_gate_heads_scratch(const void *op)
{
    (void)op;
    return 0;
}

void topwork_gate_heads(const void *op, struct worker *worker)
{
    const struct gate_heads *p = op;
    FOR_ROWS_TAKEN(worker, row, p->width) {
        const float *gates = p->gates + row * p->gates_stride;
        char *x = (char *)p->x + row * p->width * (p->is_bf16 ? 2 : 4);
        for (int64_t i = 0; i < p->width; i += LANES) {
            int64_t rest = p->width - i;
            store_some(
                x, i, rest, p->is_bf16,
                times_sigmoid(load_some(x, i, rest, p->is_bf16), load_some(gates, i, rest, false)));
        }
    }
}

struct take_rows {
    const float *x; /* [T, H] */
    float *out;     /* [S, H] */
    int64_t width;
};

int64_t topwork_take_rows_scratch(const void *op)
{
    (void)op;
    return 0;
}

void topwork_take_rows(const void *op, struct worker *worker)
{
    const struct take_rows *p = op;
    FOR_ROWS_TAKEN(worker, row, p->width)
        memcpy(p->out + row * p->width, p->x + worker->step->positions[row] * p->width,
               (size_t)p->width * sizeof(float));
}
