/* A linear layer whose weights stand in panels of int8 or of 4 bits, and those of many experts.
 *
 * A thread brings each row that it multiplies into int8 once for all its panels.
 *
 * Where ranks share the inputs of a linear in int8, its outputs can have the bits that one rank
 * with all inputs would give them, in four ops: each rank finds the largest of its inputs; all know
 * those of all, and multiply by one scale; their sums are added up, as integers; what they stand
 * for is the same on all ranks.
 */
#include "linear/int4_panel.h"
#include "linear/int8_panel.h"
#include "runtime/thread_pool.h"

struct quantized_linear {
    const void *x;       /* [T, K] float32 or bfloat16 */
    const char *weight;  /* [panels, K / 4, 32, 4] int8, or panels as in int4_panel.h */
    const float *scales; /* [N]; null: the panels have them */
    const float *bias;   /* [N], or null */
    float *y;            /* [T, N]; int32 sums if there is `largest` */
    /* [T, num_ranks]: the largest sizes that ranks have found in a row; or null */
    const float *largest;
    int64_t num_ranks;
    int64_t x_stride, y_stride, num_inputs, num_outputs, is_bf16;
    int64_t max_exponent; /* of a group of inputs; of int8 */
};

static __attribute__((noinline)) void multiply_int8(const struct job *job)
{
    switch (job->num_rows) {
#if LANES == 16
        SIX_CASES(multiply_int8_tile, job)
#else
        TWO_CASES(multiply_int8_tile, job)
#endif
    }
}

static __attribute__((noinline)) void multiply_int4(const struct job *job)
{
    switch (job->num_rows) {
        SIX_CASES(multiply_int4_tile, job)
    }
}

INLINE bool is_int8(const struct quantized_linear *p) { return p->scales != NULL; }

INLINE int64_t panel_bytes(const struct quantized_linear *p)
{
    return is_int8(p) ? int8_panel_bytes(p->num_inputs) : int4_panel_bytes(p->num_inputs);
}

/* Return how many rows of x a core works on for all panels. */
INLINE int64_t block_rows(const struct quantized_linear *p)
{
    int64_t rows = BLOCK_BYTES / coded_row_bytes(p->num_inputs) / MAX_TILE * MAX_TILE;
    return rows > MAX_TILE ? rows : MAX_TILE;
}

int64_t topwork_quantized_linear_scratch(const void *op)
{
    const struct quantized_linear *p = op;
    return coded_rows_bytes(block_rows(p), p->num_inputs);
}

/* Bring the rows of a block into int8; they are kept while the first of them is the same. */
static void code_rows(const struct quantized_linear *p, const struct block *block,
                      struct coded_rows *coded)
{
    int64_t row_size = p->x_stride * (p->is_bf16 ? 2 : 4);
    if (coded->first_row == block->first_row)
        return;
    for (int64_t row = block->first_row, i = 0; row < block->end_row; row++, i++) {
        const char *from = (const char *)p->x + row * row_size;
        int8_t *codes = coded->codes + i * coded_row_bytes(p->num_inputs);
        union group *groups = coded->groups + i * num_groups(p->num_inputs);
        if (!is_int8(p)) {
            code_groups(from, p->num_inputs, p->is_bf16, codes, groups);
            continue;
        }
        int32_t largest = p->largest == NULL
                              ? largest_bits(from, p->num_inputs, p->is_bf16)
                              : largest_of_ranks(p->largest + row * p->num_ranks, p->num_ranks);
        coded->scales[i] =
            code_row(from, p->num_inputs, p->is_bf16, largest, p->max_exponent, codes, groups);
    }
    coded->first_row = block->first_row;
}

static void multiply_block(const struct quantized_linear *p, struct block block,
                           struct coded_rows *coded)
{
    int64_t first = block.panel * PANEL, num_outputs = smaller(PANEL, p->num_outputs - first);
    size_t size = (size_t)num_outputs * sizeof(float);
    float scales[PANEL] = {0}, bias[PANEL] = {0};
    if (is_int8(p))
        memcpy(scales, p->scales + block.weight_panel * PANEL, size);
    if (p->bias != NULL)
        memcpy(bias, p->bias + block.weight_panel * PANEL, size);
    code_rows(p, &block, coded);
    struct job job = {
        .x = coded->codes,
        .row_scales = coded->scales,
        .groups = coded->groups,
        .weights = p->weight + block.weight_panel * panel_bytes(p),
        .scales = scales,
        .bias = bias,
        .y = p->y + block.first_row * p->y_stride + first,
        .row_size = coded_row_bytes(p->num_inputs),
        .wants_sums = p->largest != NULL,
        .y_stride = p->y_stride,
        .num_inputs = p->num_inputs,
        .num_outputs = num_outputs,
    };
    for (int64_t left = block.end_row - block.first_row; left > 0; left -= job.num_rows) {
        job.num_rows = smaller(left, is_int8(p) ? INT8_TILE : INT4_TILE);
        (is_int8(p) ? multiply_int8 : multiply_int4)(&job);
        job.x += job.num_rows * job.row_size;
        job.row_scales += job.num_rows;
        job.groups += job.num_rows * num_groups(p->num_inputs);
        job.y += job.num_rows * job.y_stride;
    }
}

INLINE struct coded_rows make_memory(const struct quantized_linear *p, char *scratch)
{
    return make_coded_rows(scratch, block_rows(p), p->num_inputs);
}

void topwork_quantized_linear(const void *op, struct worker *worker)
{
    const struct quantized_linear *p = op;
    struct rows_and_panels all = {worker->step->num_rows, block_rows(p),
                                  num_panels(p->num_outputs)};
    struct coded_rows memory = make_memory(p, worker->scratch);
    for (int64_t task; (task = take_task(worker, num_blocks(&all))) >= 0;)
        multiply_block(p, nth_block(&all, task), &memory);
}

struct grouped_quantized_linear {
    struct quantized_linear linear; /* x [T top_k, K], y [T top_k, N], all else of all experts */
    const int64_t *starts;          /* [num_experts + 1]: the rows of x of each expert */
    int64_t num_experts;
};

int64_t topwork_grouped_quantized_linear_scratch(const void *op)
{
    return topwork_quantized_linear_scratch(&((const struct grouped_quantized_linear *)op)->linear);
}

void topwork_grouped_quantized_linear(const void *op, struct worker *worker)
{
    const struct grouped_quantized_linear *g = op;
    const struct quantized_linear *p = &g->linear;
    struct experts experts = {g->starts, g->num_experts, block_rows(p), num_panels(p->num_outputs)};
    int64_t num_tasks = tasks_of_experts(&experts);
    struct coded_rows memory = make_memory(p, worker->scratch);
    struct expert_cursor cursor = {0};
    for (int64_t task; (task = take_task(worker, num_tasks)) >= 0;)
        multiply_block(p, block_of_task(&experts, &cursor, task), &memory);
}
