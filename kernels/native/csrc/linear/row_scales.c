/* What stands before and behind the sums of linears whose inputs ranks share: see
 * quantized_linear.c. And what ranks have of a row, as part of what all have. */
#include "linear/int8_panel.h"
#include "rows.h"

struct row_largest {
    const void *x; /* [T, K] float32 or bfloat16 */
    float *out;    /* [T, num_ranks]: this rank's column; zeros in others, to be summed */
    int64_t x_stride, num_inputs, is_bf16, is_rotated, rank, num_ranks;
};

int64_t topwork_row_largest_scratch(const void *op)
{
    const struct row_largest *p = op;
    return num_groups(p->num_inputs) * GROUP * (int64_t)sizeof(float);
}

void topwork_row_largest(const void *op, struct worker *worker)
{
    const struct row_largest *p = op;
    int64_t row_size = p->x_stride * (p->is_bf16 ? 2 : 4);
    FOR_ROWS_TAKEN(worker, row, p->num_inputs) {
        float *out = p->out + row * p->num_ranks;
        memset(out, 0, (size_t)p->num_ranks * sizeof(float));
        struct plain_row plain = {(const char *)p->x + row * row_size, p->num_inputs, p->is_bf16,
                                  p->is_rotated};
        out[p->rank] = float_of(load_row(&plain, (float *)worker->scratch));
    }
}

struct scale_sums {
    const int32_t *sums;   /* [T, N] */
    const float *largest;  /* [T, num_ranks] */
    const float *scales;   /* [N]; of experts [num_experts, padded_outputs] */
    const float *bias;     /* likewise, or null */
    const int64_t *starts; /* [num_experts + 1]: the rows of each expert; null: there is none */
    float *y;              /* [T, N] */
    int64_t num_ranks, width, padded_outputs, num_experts;
};

int64_t topwork_scale_sums_scratch(const void *op)
{
    (void)op;
    return 0;
}

/* Write what sums stand for. */
void topwork_scale_sums(const void *op, struct worker *worker)
{
    const struct scale_sums *p = op;
    int64_t expert = 0;
    FOR_ROWS_TAKEN(worker, row, p->width) {
        float *y = p->y + row * p->width;
        if (p->starts != NULL) {
            if (row < p->starts[expert]) /* of another thread's share */
                expert = 0;
            while (expert < p->num_experts && row >= p->starts[expert + 1])
                expert++;
            if (expert == p->num_experts)
                continue;
        }
        const float *scales = p->scales + expert * p->padded_outputs;
        const float *bias = p->bias == NULL ? NULL : p->bias + expert * p->padded_outputs;
        float scale = scale_of(largest_of_ranks(p->largest + row * p->num_ranks, p->num_ranks));
        for (int64_t i = 0; i < p->width; i += LANES) {
            int64_t left = p->width - i;
            f32v of_outputs = load_some(scales, i, left, false);
            f32v biases = bias == NULL ? (f32v){0} : load_some(bias, i, left, false);
            i32v sums = (i32v)load_some(p->sums + row * p->width, i, left, false);
            store_some(y, i, left, false, int8_outputs(sums, scale, of_outputs, biases));
        }
    }
}

enum { MOST_PIECES = 2 };

struct spread {
    const char *x;
    char *out;                  /* zeros around the pieces, to be summed over ranks */
    int64_t x_stride, out_size; /* bytes, as all that follow */
    int64_t from[MOST_PIECES], size[MOST_PIECES], to[MOST_PIECES];
};

int64_t topwork_spread_scratch(const void *op)
{
    (void)op;
    return 0;
}

void topwork_spread(const void *op, struct worker *worker)
{
    const struct spread *p = op;
    FOR_ROWS_TAKEN(worker, row, p->out_size / 4) {
        char *out = p->out + row * p->out_size;
        memset(out, 0, (size_t)p->out_size);
        for (int i = 0; i < MOST_PIECES; i++)
            memcpy(out + p->to[i], p->x + row * p->x_stride + p->from[i], (size_t)p->size[i]);
    }
}
