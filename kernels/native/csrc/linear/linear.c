/* A linear layer whose weights stand in panels of 32 outputs, and those of many experts, whose
 * panels stand one expert's behind the other's.
 *
 * A panel for a block of rows is a task, in tiles of rows.
 */
#include "linear/gated.h"
#include "linear/panel_amx.h"
#include "linear/panel_floats.h"
#include "runtime/thread_pool.h"

struct linear {
    const void *x;      /* [T, K] */
    const void *weight; /* [panels, K, 32] float32, or [panels, K / 2, 32, 2] bfloat16, or coded */
    const float *bias;  /* [N], or null */
    float *y;           /* [T, N] */
    /* Of coded panels, as coding.c writes them; else null. */
    const uint8_t *tables;
    const struct outlier *outliers;
    const int32_t *num_outliers;
    int64_t max_outliers;
    int64_t x_stride, y_stride, num_inputs, num_outputs, is_bf16;
    struct linear_delta delta;
};

static __attribute__((noinline)) void plain_f32(const struct job *job)
{
    multiply_rows(PLAIN_F32, job);
}

static __attribute__((noinline)) void plain_bf16(const struct job *job)
{
    multiply_rows(PLAIN_BF16, job);
}

static __attribute__((noinline)) void coded_bf16(const struct job *job)
{
    if (PANEL_VECTORS == TILE_VECTORS) /* else rows are widened, but for one by itself */
        multiply_rows(CODED, job);
}

/* A row by itself has the sums of a whole panel in registers, which is read as it lies then; of so
 * few sums as a tile's each product would wait for the one before. */
static __attribute__((noinline)) void whole_panel(enum form form, const struct job *job)
{
    if (form == CODED)
        multiply_tile(1, PANEL_VECTORS, CODED, job);
    else if (form == PLAIN_BF16)
        multiply_tile(1, PANEL_VECTORS, PLAIN_BF16, job);
    else
        multiply_tile(1, PANEL_VECTORS, PLAIN_F32, job);
}

INLINE int64_t num_steps(const struct linear *p)
{
    return p->is_bf16 ? (p->num_inputs + 1) / 2 : p->num_inputs;
}

INLINE bool is_tiled(const struct linear *p) { return HAS_TILES && p->is_bf16 && may_use_amx(); }

INLINE bool is_widened(const struct linear *p) { return p->is_bf16 && !HAS_DOTS; }

INLINE bool has_half_pair(const struct linear *p) { return p->is_bf16 && p->num_inputs % 2; }

/* Return how many rows of x a core works on for all panels. */
INLINE int64_t block_rows(const struct linear *p)
{
    int64_t size = p->is_bf16 && !is_widened(p) ? 2 : 4;
    int64_t rows = BLOCK_BYTES / (p->num_inputs * size) / MAX_TILE * MAX_TILE;
    return rows > MAX_TILE ? rows : MAX_TILE;
}

/* Tell by what instructions bfloat16 are multiplied in this process. */
const char *topwork_products(void)
{
    if (may_use_amx())
        return "AMX";
    return HAS_DOTS ? "AVX512-BF16" : LANES == 16 ? "AVX-512" : "AVX2";
}

/* What a thread keeps from one task to the next, for the way in which it multiplies. */
struct memory {
    struct tiling tiling;
    struct widening widening;
    char *padding; /* [MAX_TILE, inputs and one more] bfloat16; NULL: none is needed */
};

INLINE int64_t memory_bytes(const struct linear *p)
{
    if (is_tiled(p))
        return tiling_bytes(num_steps(p));
    if (is_widened(p))
        return widening_bytes(block_rows(p), num_steps(p));
    return has_half_pair(p) ? MAX_TILE * (p->num_inputs + 1) * 2 : 0;
}

int64_t topwork_linear_scratch(const void *op)
{
    const struct linear *p = op;
    return round_up(memory_bytes(p), LINE) + delta_scratch(&p->delta);
}

INLINE struct memory make_memory(const struct linear *p, char *scratch)
{
    struct memory memory = {.padding = NULL};
    if (is_tiled(p))
        memory.tiling = make_tiling(scratch);
    else if (is_widened(p))
        memory.widening = make_widening(scratch, block_rows(p), num_steps(p));
    else if (has_half_pair(p))
        memory.padding = scratch;
    return memory;
}

/* Copy rows whose last input has no partner, and give it a zero. */
static void pad(struct job *job, char *padding)
{
    int64_t size = job->num_inputs * 2;
    for (int64_t row = 0; row < job->num_rows; row++) {
        memcpy(padding + row * (size + 2), job->x + row * job->row_size, (size_t)size);
        memset(padding + row * (size + 2) + size, 0, 2);
    }
    job->x = padding;
    job->row_size = size + 2;
}

/* Multiply a tile of rows. */
static void multiply(enum form form, struct job job)
{
    if (job.num_rows == 1 && PANEL_VECTORS > TILE_VECTORS) {
        whole_panel(form, &job);
        return;
    }
    if (form == CODED) {
        coded_bf16(&job);
        return;
    }
    int64_t num_outputs = job.num_outputs;
    for (int64_t i = 0; i < num_outputs; i += TILE_COLUMNS) {
        job.num_outputs = num_outputs - i;
        (form == PLAIN_BF16 ? plain_bf16 : plain_f32)(&job);
        job.weights += TILE_COLUMNS * 4;
        job.ahead += TILE_COLUMNS * 4;
        job.bias = job.bias == NULL ? NULL : job.bias + TILE_COLUMNS;
        job.sums = job.sums == NULL ? NULL : job.sums + TILE_COLUMNS;
        job.y += TILE_COLUMNS;
    }
}

/* Multiply any number of rows in tiles of a like size. */
static void multiply_rows_of(enum form form, struct job job, char *padding)
{
    int64_t rows_left = job.num_rows, num_tiles = round_up(rows_left, MAX_TILE) / MAX_TILE;
    for (; num_tiles > 0; num_tiles--, rows_left -= job.num_rows) {
        job.num_rows = (rows_left + num_tiles - 1) / num_tiles;
        struct job tile = job;
        if (padding != NULL)
            pad(&tile, padding);
        multiply(form, tile);
        job.x += job.num_rows * job.row_size;
        job.y += job.num_rows * job.y_stride;
        job.sums = job.sums == NULL ? NULL : job.sums + job.num_rows * PANEL;
    }
}

INLINE struct coded_panel coded_panel(const struct linear *p, int64_t panel)
{
    static const struct outlier none;
    int64_t num_groups = (num_steps(p) + 1) / GROUP_STEPS;
    return (struct coded_panel){
        .groups = (const uint8_t *)p->weight + panel * num_groups * GROUP_BYTES,
        .table = p->tables + panel * NUM_CODES,
        .outliers = p->max_outliers == 0 ? &none : p->outliers + panel * p->max_outliers,
        .num_outliers = p->num_outliers[panel],
    };
}

INLINE struct outputs outputs_of(const struct linear *p, struct block block)
{
    return (struct outputs){p->y + block.first_row * p->y_stride + block.panel * PANEL,
                            p->y_stride};
}

static void multiply_block(const struct linear *p, struct block block, struct outputs to,
                           struct memory *memory)
{
    int64_t first_row = block.first_row, first = block.panel * PANEL;
    enum form form = !p->is_bf16 ? PLAIN_F32 : p->tables == NULL ? PLAIN_BF16 : CODED;
    float bias[PANEL] = {0};
    struct coded_panel coded;
    struct job job = {
        .y = to.y,
        .bias = bias,
        .weights = (const char *)p->weight + block.weight_panel * num_steps(p) * PANEL * 4,
        .num_rows = block.end_row - first_row,
        .row_size = p->x_stride * (p->is_bf16 ? 2 : 4),
        .y_stride = to.stride,
        .num_steps = num_steps(p),
        .num_inputs = p->num_inputs,
        .num_outputs = smaller(PANEL, p->num_outputs - first),
    };
    job.x = (const char *)p->x + first_row * job.row_size;
    job.ahead = (uintptr_t)job.weights + AHEAD * PANEL * 4;
    job.ahead_size = PANEL * 4;
    if (p->bias != NULL)
        memcpy(bias, p->bias + block.weight_panel * PANEL, (size_t)job.num_outputs * sizeof(float));
    if (form == CODED) {
        coded = coded_panel(p, block.weight_panel);
        job.coded = &coded;
    }
    if (is_tiled(p)) {
        multiply_in_tiles(job, &memory->tiling);
        return;
    }
    if (is_widened(p))
        widen_rows(&job, first_row, &memory->widening);
    if (is_widened(p)
        && job.num_rows > MAX_PAIRS_TILE) { /* weights are widened for all tiles at once */
        struct parts parts = parts_of(&job);
        for (struct job part; next_part(&parts, &memory->widening, &part);)
            multiply_rows_of(PLAIN_F32, part, memory->padding);
        return;
    }
    multiply_rows_of(form, job, memory->padding);
}

/* Begin with the deltas of a step's rows; where these are many, all threads meet. */
static struct delta begin_deltas(const struct linear *p, const struct worker *worker,
                                 struct memory *memory)
{
    char *own = (char *)worker->scratch + round_up(memory_bytes(p), LINE);
    struct delta delta = begin_delta(&p->delta, worker, own, &memory->tiling.rows);
    if (shares_delta_rows(delta.op, worker->step->num_rows))
        topwork_meet(worker);
    return delta;
}

/* A task is one panel for one block of rows; blocks come one after the other. */
void topwork_linear(const void *op, struct worker *worker)
{
    const struct linear *p = op;
    struct rows_and_panels all = {worker->step->num_rows, block_rows(p),
                                  num_panels(p->num_outputs)};
    struct memory memory = make_memory(p, worker->scratch);
    struct delta delta = begin_deltas(p, worker, &memory);
    for (int64_t task; (task = take_task(worker, num_blocks(&all))) >= 0;) {
        struct block block = nth_block(&all, task);
        struct outputs to = outputs_of(p, block);
        fetch_block_delta(&delta, block);
        multiply_block(p, block, to, &memory);
        add_block_delta(&delta, block, to);
    }
    if (memory.tiling.rows.first > 0)
        release_tiles();
}

struct gated_linear {
    struct linear linear; /* of gates and ups; without y */
    struct gated gated;
};

int64_t topwork_gated_linear_scratch(const void *op)
{
    return gated_scratch(topwork_linear_scratch(op));
}

void topwork_gated_linear(const void *op, struct worker *worker)
{
    const struct gated_linear *g = op;
    const struct linear *p = &g->linear;
    struct rows_and_panels all =
        gated_rows_and_panels(worker->step->num_rows, block_rows(p), p->num_outputs);
    struct memory memory = make_memory(p, worker->scratch);
    struct delta delta = begin_deltas(p, worker, &memory);
    struct outputs gates = gated_outputs(worker, topwork_linear_scratch(p));
    for (int64_t task; (task = take_task(worker, num_blocks(&all))) >= 0;) {
        struct block block = nth_block(&all, task), ups = ups_of(block, all.num_panels);
        fetch_block_delta(&delta, block);
        fetch_block_delta(&delta, ups);
        multiply_block(p, block, gates, &memory);
        multiply_block(p, ups, behind_gates(gates), &memory);
        add_gated_delta(&delta, block, ups, gates);
        write_gated(&g->gated, block, gates, p->num_outputs / 2, p->is_bf16);
    }
    if (memory.tiling.rows.first > 0)
        release_tiles();
}

struct grouped_linear {
    struct linear linear;  /* x [T top_k, K], y [T top_k, N], weight and bias of all experts */
    const int64_t *starts; /* [num_experts + 1]: the rows of x of each expert */
    int64_t num_experts;
};

int64_t topwork_grouped_linear_scratch(const void *op)
{
    return topwork_linear_scratch(&((const struct grouped_linear *)op)->linear);
}

/* A task is one panel of one expert for one block of its rows; an expert's come together. */
void topwork_grouped_linear(const void *op, struct worker *worker)
{
    const struct grouped_linear *g = op;
    const struct linear *p = &g->linear;
    struct experts experts = {g->starts, g->num_experts, block_rows(p), num_panels(p->num_outputs)};
    int64_t num_tasks = tasks_of_experts(&experts);
    struct memory memory = make_memory(p, worker->scratch);
    struct expert_cursor cursor = {0};
    for (int64_t task; (task = take_task(worker, num_tasks)) >= 0;) {
        struct block block = block_of_task(&experts, &cursor, task);
        multiply_block(p, block, outputs_of(p, block), &memory);
    }
    if (memory.tiling.rows.first > 0)
        release_tiles();
}
