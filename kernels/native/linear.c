/* A linear layer whose weights stand in panels of 32 outputs.
 *
 * Owns how its work is cut: a panel for a block of rows is a task, in tiles of rows. Knows nothing
 * of what a layer is for.
 */
#include "crew.h"
#include "panel_tiles.h"

enum { BLOCK_BYTES = 512 * 1024 }; /* of x, which stay in a core's cache for all panels */

struct linear {
    const void *x;      /* [T, K] */
    const void *weight; /* [panels, K, 32] float32, or [panels, K / 2, 32, 2] bfloat16, or coded */
    const float *bias;  /* [N], or null */
    float *y;           /* [T, N] */
    /* Of coded panels, as coding.c writes them; else null. */
    const uint8_t *tables;
    const struct rare *rare;
    const int32_t *num_rare;
    int64_t max_rare;
    int64_t x_stride, y_stride, num_inputs, num_outputs, is_bf16;
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
    multiply_rows(CODED, job);
}

/* Return how many rows of x a core works on for all panels. */
INLINE int64_t block_rows(const struct linear *p)
{
    int64_t rows = BLOCK_BYTES / (p->num_inputs * (p->is_bf16 ? 2 : 4)) / MAX_TILE * MAX_TILE;
    return rows > MAX_TILE ? rows : MAX_TILE;
}

INLINE int64_t num_steps(const struct linear *p)
{
    return p->is_bf16 ? (p->num_inputs + 1) / 2 : p->num_inputs;
}

INLINE bool has_half_pair(const struct linear *p) { return p->is_bf16 && p->num_inputs % 2; }

INLINE bool is_tiled(const struct linear *p)
{
    return HAS_TILES && p->is_bf16 && topwork_has_tiles();
}

int64_t topwork_linear_scratch(const void *op)
{
    const struct linear *p = op;
    if (is_tiled(p))
        return tiling_bytes(num_steps(p));
    return has_half_pair(p) ? MAX_TILE * (p->num_inputs + 1) * 2 : 0;
}

/* Copy rows whose last input has no partner, and give it a zero. */
static const char *padded(const struct linear *p, const char *x, int64_t num_rows, char *scratch)
{
    int64_t size = p->num_inputs * 2;
    for (int64_t row = 0; row < num_rows; row++) {
        memcpy(scratch + row * (size + 2), x + row * p->x_stride * 2, (size_t)size);
        memset(scratch + row * (size + 2) + size, 0, 2);
    }
    return scratch;
}

/* Multiply a tile by the panel that a job tells. */
static void multiply(const struct linear *p, struct job job, int64_t row, char *scratch)
{
    job.row_size = p->x_stride * (p->is_bf16 ? 2 : 4);
    job.x = (const char *)p->x + row * job.row_size;
    if (has_half_pair(p)) {
        job.x = padded(p, job.x, job.num_rows, scratch);
        job.row_size = (p->num_inputs + 1) * 2;
    }
    job.y += row * p->y_stride;
    if (job.coded != NULL) {
        coded_bf16(&job);
        return;
    }
    int64_t num_outputs = job.num_outputs;
    for (int64_t i = 0; i < num_outputs; i += TILE_COLUMNS) {
        job.num_outputs = num_outputs - i;
        (p->is_bf16 ? plain_bf16 : plain_f32)(&job);
        job.weights += TILE_COLUMNS * 4;
        job.bias += TILE_COLUMNS;
        job.y += TILE_COLUMNS;
    }
}

INLINE struct coded_panel coded_panel(const struct linear *p, int64_t panel)
{
    int64_t num_groups = (num_steps(p) + 1) / GROUP_STEPS;
    return (struct coded_panel){
        .groups = (const uint8_t *)p->weight + panel * num_groups * GROUP_BYTES,
        .table = p->tables + panel * NUM_CODES,
        .rare = p->rare + panel * p->max_rare,
        .num_rare = p->num_rare[panel],
    };
}

static void multiply_block(const struct linear *p, int64_t first_row, int64_t end_row,
                           int64_t panel, char *scratch, struct tiling *tiling)
{
    int64_t first = panel * PANEL;
    int64_t num_tiles = round_up(end_row - first_row, MAX_TILE) / MAX_TILE;
    float bias[PANEL] = {0};
    struct coded_panel coded;
    struct job job = {
        .y = p->y + first,
        .bias = bias,
        .weights = (const char *)p->weight + panel * num_steps(p) * PANEL * 4,
        .y_stride = p->y_stride,
        .num_steps = num_steps(p),
        .num_inputs = p->num_inputs,
        .num_outputs = smaller(PANEL, p->num_outputs - first),
    };
    if (p->bias != NULL)
        memcpy(bias, p->bias + first, (size_t)job.num_outputs * sizeof(float));
    if (p->tables != NULL) {
        coded = coded_panel(p, panel);
        job.coded = &coded;
    }
    if (tiling != NULL) {
        job.row_size = p->x_stride * 2;
        job.x = (const char *)p->x + first_row * job.row_size;
        job.y += first_row * p->y_stride;
        job.num_rows = end_row - first_row;
        multiply_in_tiles(job, tiling);
        return;
    }
    for (int64_t tile = 0, row = first_row; tile < num_tiles; tile++, row += job.num_rows) {
        job.num_rows = (end_row - row + num_tiles - tile - 1) / (num_tiles - tile);
        multiply(p, job, row, scratch);
    }
}

/* A task is one panel for one block of rows; blocks come one after the other. */
void topwork_linear(const void *op, struct worker *worker)
{
    const struct linear *p = op;
    int64_t num_rows = worker->step->num_rows, rows = block_rows(p);
    int64_t num_panels = round_up(p->num_outputs, PANEL) / PANEL;
    int64_t num_tasks = round_up(num_rows, rows) / rows * num_panels;
    struct tiling tiling, *used = NULL; /* unless it is in AMX's tiles */
    if (is_tiled(p)) {
        tiling = make_tiling(worker->scratch);
        used = &tiling;
    }
    for (int64_t task; (task = take_task(worker, num_tasks)) >= 0;) {
        int64_t first = task / num_panels * rows;
        multiply_block(p, first, smaller(first + rows, num_rows), task % num_panels,
                       worker->scratch, used);
    }
    if (used != NULL)
        release_tiles();
}
