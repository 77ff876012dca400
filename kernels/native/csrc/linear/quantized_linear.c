/* A linear layer whose weights stand in panels of int8 or of 4 bits, and those of many experts.
 *
 * Few rows each thread brings into int8 for itself, once for all its panels. Of more each thread
 * brings some there, and all of them meet before they multiply.
 *
 * Where ranks share the inputs of a linear in int8, its outputs can have the bits that one rank
 * with all inputs would give them, in four ops: each rank finds the largest of its inputs; all know
 * those of all, and multiply by one scale; their sums are added up, as integers; what they stand
 * for is the same on all ranks.
 */
#include "linear/gated.h"
#include "linear/int4_tiles.h"
#include "runtime/thread_pool.h"

struct quantized_linear {
    const void *x;       /* [T, K] float32 or bfloat16 */
    const char *weight;  /* [panels, K / 4, 32, 4] int8, or panels as in int4_panel.h */
    const float *scales; /* [N]; null: the panels have them */
    const float *bias;   /* [N], or null */
    float *y;            /* [T, N]; int32 sums if there is `largest` */
    /* [T, num_ranks]: the largest sizes that ranks have found in a row; or null */
    const float *largest;
    char *coded; /* [T, coded rows' bytes]: of no meaning before or afterwards */
    int64_t num_ranks;
    int64_t x_stride, y_stride, num_inputs, num_outputs, is_bf16;
    int64_t is_rotated; /* whether groups of inputs are; of int8 */
    struct linear_delta delta;
};

enum {
    FEW_ROWS = 16, /* that each thread brings into int8 for itself */
    FEW_FOR_BYTE_TILES =
        2, /* in int8, which wait for memory: telling the tiles would take longer */
};

static __attribute__((noinline)) void multiply_int8(const struct job *job)
{
    switch (job->num_rows) {
#if LANES == 16
        TWELVE_CASES(multiply_int8_tile, job)
#else
        TWO_CASES(multiply_int8_tile, job)
#endif
    }
}

static __attribute__((noinline)) void multiply_int4(const struct job *job)
{
    switch (job->num_rows) {
#if LANES == 16
        SIX_CASES(multiply_int4_tile, job)
#else
        FOUR_CASES(multiply_int4_tile, job)
#endif
    }
}

INLINE bool is_int8(const struct quantized_linear *p) { return p->scales != NULL; }

INLINE int64_t panel_bytes(const struct quantized_linear *p)
{
    return is_int8(p) ? int8_panel_bytes(p->num_inputs) : int4_panel_bytes(p->num_inputs);
}

/* Tell whether products in int8 are computed in tiles of AMX, unless of few rows. */
INLINE bool is_tiled(const struct quantized_linear *p)
{
    return is_int8(p) && may_use_byte_tiles();
}

/* Tell whether those of some rows with codes of 4 bits are. */
INLINE bool has_int4_tiles(const struct quantized_linear *p, int64_t num_rows)
{
    return !is_int8(p) && num_rows > FEW_FOR_TILES && may_use_byte_tiles();
}

INLINE struct coded_form form_of(const struct quantized_linear *p)
{
    return coded_form(p->num_inputs, is_int8(p));
}

/* Return how many bytes of memory `coded` has for each row. */
int64_t topwork_coded_row_bytes(const void *op)
{
    const struct quantized_linear *p = op;
    return memory_of_coded_row(p->num_inputs, is_int8(p));
}

/* Return how many rows of x a core works on for all panels. */
INLINE int64_t block_rows(const struct quantized_linear *p)
{
    int64_t rows = BLOCK_BYTES / form_of(p).row_bytes / MAX_TILE * MAX_TILE;
    return rows > MAX_TILE ? rows : MAX_TILE;
}

/* Bring rows into int8, with memory for the numbers of one in whole groups. */
static void code_rows(const struct quantized_linear *p, int64_t first_row, int64_t end_row,
                      char *to, float *numbers)
{
    struct coded_form form = form_of(p);
    int64_t row_size = p->x_stride * (p->is_bf16 ? 2 : 4);
    for (int64_t row = first_row; row < end_row; row++, to += form.row_bytes) {
        struct plain_row plain = {(const char *)p->x + row * row_size, p->num_inputs, p->is_bf16,
                                  p->is_rotated};
        if (!is_int8(p)) {
            code_groups(&plain, &form, to);
            continue;
        }
        int32_t largest = load_row(&plain, numbers);
        if (p->largest != NULL)
            largest = largest_of_ranks(p->largest + row * p->num_ranks, p->num_ranks);
        code_row(numbers, largest, p->num_inputs, &form, to);
    }
}

/* The rows of a step in int8, where a thread finds them. */
struct coded_rows {
    const char *rows; /* [rows, row_bytes] */
    int64_t row_bytes;
};

/* Return the first rows of a step in int8, or all, if lora_shrink has brought them there. */
static struct coded_rows code_first(const struct quantized_linear *p, int64_t num_rows,
                                    const struct worker *worker)
{
    int64_t row_bytes = form_of(p).row_bytes;
    float *numbers = (float *)(worker->scratch + FEW_ROWS * row_bytes);
    if (codes_all_rows(&p->delta.lora, worker->step)) {
        if (shares_delta_rows(&p->delta.lora, num_rows))
            topwork_meet(worker);
        return (struct coded_rows){p->delta.lora.coded, row_bytes};
    }
    if (num_rows <= FEW_ROWS) {
        code_rows(p, 0, num_rows, worker->scratch, numbers);
        return (struct coded_rows){worker->scratch, row_bytes};
    }
    int64_t first = begin_of_share(worker, worker->index, num_rows);
    int64_t end = begin_of_share(worker, worker->index + 1, num_rows);
    code_rows(p, first, end, p->coded + first * row_bytes, numbers);
    topwork_meet(worker);
    return (struct coded_rows){p->coded, row_bytes};
}

INLINE struct outputs outputs_of(const struct quantized_linear *p, struct block block)
{
    return (struct outputs){p->y + block.first_row * p->y_stride + block.panel * PANEL,
                            p->y_stride};
}

/* Multiply a block; meanwhile what will be added to it is fetched, if there is a `delta`. */
static void multiply_block(const struct quantized_linear *p, struct block block, struct outputs to,
                           struct coded_rows coded, const struct delta *delta,
                           struct byte_tiling *tiling)
{
    int64_t first = block.panel * PANEL, num_outputs = smaller(PANEL, p->num_outputs - first);
    size_t size = (size_t)num_outputs * sizeof(float);
    float scales[PANEL] = {0}, bias[PANEL] = {0};
    if (is_int8(p))
        memcpy(scales, p->scales + block.weight_panel * PANEL, size);
    if (p->bias != NULL)
        memcpy(bias, p->bias + block.weight_panel * PANEL, size);
    struct job job = {
        .x = coded.rows + block.first_row * coded.row_bytes,
        .form = form_of(p),
        .weights = p->weight + block.weight_panel * panel_bytes(p),
        .scales = scales,
        .bias = bias,
        .y = to.y,
        .wants_sums = p->largest != NULL,
        .y_stride = to.stride,
        .num_inputs = p->num_inputs,
        .num_outputs = num_outputs,
    };
    if (has_int4_tiles(p, block.end_row - block.first_row)) {
        job.num_rows = block.end_row - block.first_row;
        multiply_int4_in_tiles(job, tiling);
        return;
    }
    int64_t most = is_tiled(p) ? INT8_PASS : is_int8(p) ? INT8_TILE : INT4_TILE;
    int64_t left = block.end_row - block.first_row, num_passes = round_up(left, most) / most;
    int64_t num_parts = round_up(p->num_inputs, PART_INPUTS) / PART_INPUTS;
    int64_t num_times = (num_passes - 1) * num_parts;
    struct fetching behind = fetching_behind(job.weights, panel_bytes(p), num_times);
    struct fetching *fetching = NULL;
    struct b_fetching of_b = begin_to_fetch_b(delta, block.first_row, block.panel);
    for (; num_passes > 0; num_passes--, left -= job.num_rows, fetching = &behind) {
        job.num_rows = (left + num_passes - 1) / num_passes;
        job.is_fetched = fetching == NULL || num_passes == 1;
        fetch_b(&of_b, block.end_row - left + job.num_rows);
        if (is_tiled(p) && job.num_rows > FEW_FOR_BYTE_TILES)
            multiply_int8_pass(&job, fetching, tiling);
        else
            (is_int8(p) ? multiply_int8 : multiply_int4)(&job);
        job.x += job.num_rows * job.form.row_bytes;
        job.y += job.num_rows * job.y_stride;
    }
}

/* Return the bytes that a thread needs for few rows in int8 and for the numbers of one. */
INLINE int64_t rows_scratch(const struct quantized_linear *p)
{
    int64_t numbers = is_int8(p) ? num_groups(p->num_inputs) * GROUP * (int64_t)sizeof(float) : 0;
    return FEW_ROWS * form_of(p).row_bytes + numbers;
}

INLINE int64_t tiling_bytes(const struct quantized_linear *p)
{
    if (!may_use_byte_tiles())
        return 0;
    return is_int8(p) ? (int64_t)BYTE_TILING : int4_tiling_bytes(p->num_inputs);
}

int64_t topwork_quantized_linear_scratch(const void *op)
{
    const struct quantized_linear *p = op;
    return round_up(rows_scratch(p) + tiling_bytes(p), LINE) + delta_scratch(&p->delta);
}

INLINE struct byte_tiling make_byte_tiling(const struct quantized_linear *p, char *scratch)
{
    return (struct byte_tiling){.memory = scratch + rows_scratch(p)};
}

/* Begin with the deltas of a step's rows; where these are many, all threads meet before they add
 * them, when they have brought the rows of x into int8. */
static struct delta begin_deltas(const struct quantized_linear *p, const struct worker *worker,
                                 struct byte_tiling *tiling)
{
    _Static_assert((int)FEW_DELTA_ROWS == (int)FEW_ROWS, "they meet for both or for neither");
    char *own = (char *)worker->scratch + round_up(rows_scratch(p) + tiling_bytes(p), LINE);
    return begin_delta(&p->delta, worker, own, &tiling->rows);
}

void topwork_quantized_linear(const void *op, struct worker *worker)
{
    const struct quantized_linear *p = op;
    struct rows_and_panels all = {worker->step->num_rows, block_rows(p),
                                  num_panels(p->num_outputs)};
    struct byte_tiling tiling = make_byte_tiling(p, worker->scratch);
    struct delta delta = begin_deltas(p, worker, &tiling);
    struct coded_rows coded = code_first(p, all.num_rows, worker);
    for (int64_t task; (task = take_task(worker, num_blocks(&all))) >= 0;) {
        struct block block = nth_block(&all, task);
        struct outputs to = outputs_of(p, block);
        multiply_block(p, block, to, coded, &delta, &tiling);
        add_block_delta(&delta, block, to);
    }
    if (tiling.rows.first > 0)
        release_tiles();
}

struct gated_quantized_linear {
    struct quantized_linear linear; /* of gates and ups; without y */
    struct gated gated;
};

int64_t topwork_gated_quantized_linear_scratch(const void *op)
{
    return gated_scratch(topwork_quantized_linear_scratch(op));
}

void topwork_gated_quantized_linear(const void *op, struct worker *worker)
{
    const struct gated_quantized_linear *g = op;
    const struct quantized_linear *p = &g->linear;
    struct rows_and_panels all =
        gated_rows_and_panels(worker->step->num_rows, block_rows(p), p->num_outputs);
    struct byte_tiling tiling = make_byte_tiling(p, worker->scratch);
    struct delta delta = begin_deltas(p, worker, &tiling);
    struct coded_rows coded = code_first(p, all.num_rows, worker);
    struct outputs gates = gated_outputs(worker, topwork_quantized_linear_scratch(p));
    for (int64_t task; (task = take_task(worker, num_blocks(&all))) >= 0;) {
        struct block block = nth_block(&all, task), ups = ups_of(block, all.num_panels);
        multiply_block(p, block, gates, coded, &delta, &tiling);
        multiply_block(p, ups, behind_gates(gates), coded, &delta, &tiling);
        add_gated_delta(&delta, block, ups, gates);
        write_gated(&g->gated, block, gates, p->num_outputs / 2, p->is_bf16);
    }
    if (tiling.rows.first > 0)
        release_tiles();
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
    struct coded_rows coded = code_first(p, g->starts[g->num_experts], worker);
    struct byte_tiling tiling = make_byte_tiling(p, worker->scratch);
    struct expert_cursor cursor = {0};
    for (int64_t task; (task = take_task(worker, num_tasks)) >= 0;) {
        struct block block = block_of_task(&experts, &cursor, task);
        multiply_block(p, block, outputs_of(p, block), coded, NULL, &tiling);
    }
    if (tiling.rows.first > 0)
        release_tiles();
}

/* Return how many bytes of memory the `inner` of a linear's delta has for each row. */
int64_t topwork_delta_row_bytes(const void *lora) { return delta_row_bytes(lora); }
