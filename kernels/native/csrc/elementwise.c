/* The small ops between the matrix products: norm, rotation with the KV write, gated activation,
 * and the choice of the rows that are sampled.
 *
 * Owns where each of them rounds: once, when it stores. Sums over a row are 16, one for each
 * element modulo 16, folded at the end. Knows nothing of layers or of which rank holds what.
 */
#include <math.h>

#include "runtime/thread_pool.h"
#include "simd/vector.h"

enum {
    TASK_ELEMENTS = 8 * 1024, /* what a thread takes at once; decides speed only */
};

/* Rows that a thread takes at once, for rows of so many elements. */
INLINE int64_t task_rows(int64_t width)
{
    return width < TASK_ELEMENTS ? TASK_ELEMENTS / width : 1;
}

/* Call `body` for every row that this thread takes. */
#define FOR_ROWS_TAKEN(worker, row, width)                                       \
    for (int64_t rows_ = task_rows(width), num_rows_ = (worker)->step->num_rows, \
                 tasks_ = round_up(num_rows_, rows_) / rows_, task_;             \
         (task_ = take_task(worker, tasks_)) >= 0;)                              \
        for (int64_t row = task_ * rows_; row < smaller((task_ + 1) * rows_, num_rows_); row++)

INLINE float root_mean_square(const float *x, int64_t width, double eps)
{
    f32v sums = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        f32v part = load_some(x, i, width - i, false);
        sums += part * part;
    }
    return sqrtf(sum_lanes(sums) / (float)width + (float)eps);
}

struct add_rms_norm {
    const float *x, *residual; /* [T, H]; residual may be null */
    const void *weight;        /* [H] */
    float *total;              /* [T, H]: x + residual */
    void *out;                 /* [T, H] */
    int64_t width, is_bf16;
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
        float *total = p->total + row * p->width;
        for (int64_t i = 0; i < p->width; i += LANES) {
            f32v sum = load_some(x, i, p->width - i, false);
            if (p->residual != NULL)
                sum += load_some(p->residual + row * p->width, i, p->width - i, false);
            store_some(total, i, p->width - i, false, sum);
        }
        float scale = 1.0f / root_mean_square(total, p->width, p->eps);
        for (int64_t i = 0; i < p->width; i += LANES) {
            f32v normed = load_some(total, i, p->width - i, false) * scale
                          * load_some(p->weight, i, p->width - i, p->is_bf16);
            store_some((char *)p->out + row * p->width * (p->is_bf16 ? 2 : 4), i, p->width - i,
                       p->is_bf16, normed);
        }
    }
}

struct rope_and_write {
    const float *qkv, *cos, *sin; /* [T, HQ + 2 HK, D], [M, D / 2], [M, D / 2] */
    const void *q_norm, *k_norm;  /* [D], or null */
    void *k_pages, *v_pages, *q;  /* [P, HK, page, D], twice; [T, HQ, D] */
    int64_t num_heads, num_kv_heads, head_dim, page_size, is_bf16;
    double eps;
};

int64_t topwork_rope_and_write_scratch(const void *op)
{
    const struct rope_and_write *p = op;
    return p->head_dim * (int64_t)sizeof(float);
}

/* Return x as Hugging Face has cosines and sines: rounded to the served dtype. */
INLINE f32v rounded(f32v x, bool is_bf16) { return is_bf16 ? widen(narrow(x)) : x; }

/* Rotate the two halves of a head, after its norm if it has one, and store it. */
INLINE void rotate(const struct rope_and_write *p, const float *x, const void *weight,
                   int64_t position, float *normed, void *to)
{
    int64_t half = p->head_dim / 2;
    if (weight != NULL) {
        float scale = 1.0f / root_mean_square(x, p->head_dim, p->eps);
        for (int64_t i = 0; i < p->head_dim; i += LANES)
            store_some(normed, i, p->head_dim - i, false,
                       load_some(x, i, p->head_dim - i, false) * scale
                           * load_some(weight, i, p->head_dim - i, p->is_bf16));
        x = normed;
    }
    for (int64_t i = 0; i < half; i += LANES) {
        f32v cos = rounded(load_some(p->cos + position * half, i, half - i, false), p->is_bf16);
        f32v sin = rounded(load_some(p->sin + position * half, i, half - i, false), p->is_bf16);
        f32v left = load_some(x, i, half - i, false);
        f32v right = load_some(x + half, i, half - i, false);
        store_some(to, i, half - i, p->is_bf16, left * cos - right * sin);
        store_some((char *)to + half * (p->is_bf16 ? 2 : 4), i, half - i, p->is_bf16,
                   right * cos + left * sin);
    }
}

void topwork_rope_and_write(const void *op, struct worker *worker)
{
    const struct rope_and_write *p = op;
    int64_t num_all = p->num_heads + 2 * p->num_kv_heads, dim = p->head_dim;
    int64_t head_size = dim * (p->is_bf16 ? 2 : 4);
    FOR_ROWS_TAKEN(worker, row, num_all * dim) {
        const float *heads = p->qkv + row * num_all * dim;
        int64_t position = worker->step->positions[row], place = worker->step->kv_loc[row];
        char *q = (char *)p->q + row * p->num_heads * head_size;
        for (int64_t i = 0; i < p->num_heads; i++)
            rotate(p, heads + i * dim, p->q_norm, position, worker->scratch, q + i * head_size);
        const float *k = heads + p->num_heads * dim, *v = k + p->num_kv_heads * dim;
        for (int64_t i = 0; i < p->num_kv_heads; i++) {
            int64_t page = place / p->page_size * p->num_kv_heads + i;
            int64_t at = (page * p->page_size + place % p->page_size) * head_size;
            rotate(p, k + i * dim, p->k_norm, position, worker->scratch, (char *)p->k_pages + at);
            for (int64_t d = 0; d < dim; d += LANES)
                store_some((char *)p->v_pages + at, d, dim - d, p->is_bf16,
                           load_some(v + i * dim, d, dim - d, false));
        }
    }
}

struct silu_and_mul {
    const float *gate_up; /* [T, 2 I], the gate first */
    void *out;            /* [T, I] */
    int64_t width, is_bf16;
};

int64_t topwork_silu_and_mul_scratch(const void *op)
{
    (void)op;
    return 0;
}

/* Return x / (1 + exp(-x)), with no exp of a positive number. */
INLINE f32v silu(f32v x)
{
    f32v e = exp_nonpositive(select_lanes(x > 0.0f, -x, x));
    return x * select_lanes(x > 0.0f, splat(1.0f), e) / (e + 1.0f);
}

void topwork_silu_and_mul(const void *op, struct worker *worker)
{
    const struct silu_and_mul *p = op;
    FOR_ROWS_TAKEN(worker, row, p->width) {
        const float *gate = p->gate_up + row * 2 * p->width, *up = gate + p->width;
        char *out = (char *)p->out + row * p->width * (p->is_bf16 ? 2 : 4);
        for (int64_t i = 0; i < p->width; i += LANES)
            store_some(out, i, p->width - i, p->is_bf16,
                       silu(load_some(gate, i, p->width - i, false))
                           * load_some(up, i, p->width - i, false));
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
