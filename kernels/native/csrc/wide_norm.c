/* The RMS norms of Q and K over all their heads together (OLMo 2), in two ops: what ranks sum
 * between them stands between the two.
 *
 * Owns which heads a rank counts: a KV head that several ranks have is one of them's to count.
 */
#include "rows.h"

struct wide_norm {
    float *qkv;                  /* [T, HQ + 2 HK, D], normed in place */
    float *sums;                 /* [T, 2]: squares of Q and of K over all ranks */
    const void *q_norm, *k_norm; /* [HQ D], [HK D] */
    int64_t stride, num_heads, num_kv_heads, head_dim;
    int64_t counts_kv;        /* whether K is this rank's to count */
    int64_t q_width, k_width; /* features over all ranks */
    int64_t is_norm_bf16;
    double eps;
};

int64_t topwork_square_sums_scratch(const void *op)
{
    (void)op;
    return 0;
}

void topwork_square_sums(const void *op, struct worker *worker)
{
    const struct wide_norm *p = op;
    int64_t width = (p->num_heads + 2 * p->num_kv_heads) * p->head_dim;
    int64_t own_q = p->num_heads * p->head_dim, own_k = p->num_kv_heads * p->head_dim;
    FOR_ROWS_TAKEN(worker, row, width) {
        const float *q = p->qkv + row * p->stride;
        p->sums[row * 2] = sum_of_squares(q, own_q);
        p->sums[row * 2 + 1] = p->counts_kv ? sum_of_squares(q + own_q, own_k) : 0.0f;
    }
}

int64_t topwork_wide_norm_scratch(const void *op)
{
    (void)op;
    return 0;
}

void topwork_wide_norm(const void *op, struct worker *worker)
{
    const struct wide_norm *p = op;
    int64_t width = (p->num_heads + 2 * p->num_kv_heads) * p->head_dim;
    int64_t own_q = p->num_heads * p->head_dim, own_k = p->num_kv_heads * p->head_dim;
    float eps = (float)p->eps;
    FOR_ROWS_TAKEN(worker, row, width) {
        float *q = p->qkv + row * p->stride, *k = q + own_q;
        const float *sums = p->sums + row * 2;
        float q_scale = 1.0f / sqrtf(sums[0] / (float)p->q_width + eps);
        float k_scale = 1.0f / sqrtf(sums[1] / (float)p->k_width + eps);
        store_scaled(q, q_scale, p->q_norm, p->is_norm_bf16, own_q, q, false);
        store_scaled(k, k_scale, p->k_norm, p->is_norm_bf16, own_k, k, false);
    }
}
