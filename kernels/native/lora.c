/* Low-rank deltas, one call for all the segments of a batch.
 *
 * Owns the order in which a row is summed: an element of A x is 16 sums, one for each input modulo
 * 16, added from the first to the last; an element of B u is one sum over the lora_rank. Both are
 * float32, the result is added to y and rounded once. A row is the same alone and in any segment.
 * Knows nothing of slots.
 */
#include <stdlib.h>

#include "vector.h"

enum {
    TASK_ROWS = 48, /* rows for which A and B are read once; decides speed only */
    DOT_ROWS = 6,   /* rows, and ranks of A, whose products share their loads */
    DOT_RANKS = 4,
};

/* Block of B that is not all zero: a run of ranks, a run of outputs, its place in b. */
struct block {
    int64_t first_rank, end_rank, first_output, end_output, first_element;
};

struct segment {
    int64_t start, stop;        /* rows */
    const float *a;             /* [lora_rank, K] */
    const float *b;             /* blocks of [ranks, outputs]: B transposed */
    const struct block *blocks; /* [num_blocks] */
    int64_t lora_rank, num_blocks;
};

struct problem {
    void *y;       /* [T, outputs] */
    const void *x; /* [T, K] */
    const struct segment *segments;
    int64_t y_stride, x_stride, num_segments, num_inputs;
    int64_t is_y_bf16, is_x_bf16, num_threads;
};

struct workspace {
    float *inputs; /* [TASK_ROWS, width]: x, zeros past K */
    float *inner;  /* [TASK_ROWS, lora_rank]: A x */
    float *edge;   /* [lora_rank, 32]: the last columns of a block of B, zeros past them */
    int64_t width;
};

INLINE void dot_tile(int num_rows, int num_ranks, const float *x, int64_t width, const float *a,
                     int64_t num_inputs, float *u, int64_t lora_rank)
{
    f32x16 sums[DOT_ROWS][DOT_RANKS];
    for (int i = 0; i < num_rows; i++)
        for (int j = 0; j < num_ranks; j++)
            sums[i][j] = (f32x16){0};
    int64_t k = 0;
    for (; k + LANES <= num_inputs; k += LANES)
        for (int j = 0; j < num_ranks; j++) {
            f32x16 factor = load_f32(a + j * num_inputs + k);
            for (int i = 0; i < num_rows; i++)
                sums[i][j] += load_f32(x + i * width + k) * factor;
        }
    if (k < num_inputs)
        for (int j = 0; j < num_ranks; j++) {
            f32x16 factor = load_some(a + j * num_inputs, k, num_inputs - k, false);
            for (int i = 0; i < num_rows; i++)
                sums[i][j] += load_f32(x + i * width + k) * factor;
        }
    for (int i = 0; i < num_rows; i++)
        for (int j = 0; j < num_ranks; j++)
            u[i * lora_rank + j] = sum_lanes(sums[i][j]);
}

INLINE void dot_rows(int64_t num_rows, int num_ranks, const float *x, int64_t width, const float *a,
                     int64_t num_inputs, float *u, int64_t lora_rank)
{
    switch (num_rows) {
    case 1: dot_tile(1, num_ranks, x, width, a, num_inputs, u, lora_rank); break;
    case 2: dot_tile(2, num_ranks, x, width, a, num_inputs, u, lora_rank); break;
    case 3: dot_tile(3, num_ranks, x, width, a, num_inputs, u, lora_rank); break;
    case 4: dot_tile(4, num_ranks, x, width, a, num_inputs, u, lora_rank); break;
    case 5: dot_tile(5, num_ranks, x, width, a, num_inputs, u, lora_rank); break;
    default: dot_tile(6, num_ranks, x, width, a, num_inputs, u, lora_rank); break;
    }
}

static void shrink(const struct problem *p, const struct segment *s, const struct workspace *w,
                   int64_t first, int64_t num_rows)
{
    int64_t element_size = p->is_x_bf16 ? 2 : 4;
    for (int64_t row = 0; row < num_rows; row++) {
        const char *from = (const char *)p->x + (first + row) * p->x_stride * element_size;
        for (int64_t k = 0; k < p->num_inputs; k += LANES)
            store_f32(w->inputs + row * w->width + k,
                      load_some(from, k, p->num_inputs - k, p->is_x_bf16));
    }
    int64_t rank = 0;
    for (; rank < s->lora_rank; rank += rank + DOT_RANKS <= s->lora_rank ? DOT_RANKS : 1) {
        const float *a = s->a + rank * p->num_inputs;
        for (int64_t row = 0; row < num_rows; row += DOT_ROWS) {
            int64_t rows = smaller(DOT_ROWS, num_rows - row);
            const float *x = w->inputs + row * w->width;
            float *u = w->inner + row * s->lora_rank + rank;
            if (rank + DOT_RANKS <= s->lora_rank)
                dot_rows(rows, DOT_RANKS, x, w->width, a, p->num_inputs, u, s->lora_rank);
            else
                dot_rows(rows, 1, x, w->width, a, p->num_inputs, u, s->lora_rank);
        }
    }
}

/* Add `count` outputs, at most 32, of a run of ranks to the rows of y; b is [ranks, 32 or more]. */
static void expand(const struct problem *p, const struct segment *s, const struct workspace *w,
                   int64_t first, int64_t num_rows, const struct block *block, int64_t output,
                   const float *b, int64_t ldb)
{
    int64_t count = smaller(TILE_COLUMNS, block->end_output - output);
    int64_t element_size = p->is_y_bf16 ? 2 : 4;
    for (int64_t row = 0; row < num_rows; row += TILE_ROWS) {
        float delta[TILE_ROWS * TILE_COLUMNS] = {0};
        int64_t rows = smaller(TILE_ROWS, num_rows - row);
        add_product(rows, delta, TILE_COLUMNS,
                    w->inner + row * s->lora_rank + block->first_rank, s->lora_rank, b, ldb,
                    block->end_rank - block->first_rank);
        for (int64_t i = 0; i < rows; i++) {
            char *to = (char *)p->y + (first + row + i) * p->y_stride * element_size;
            for (int64_t n = 0; n < count; n += LANES) {
                f32x16 sum = load_some(to, output + n, count - n, p->is_y_bf16)
                             + load_f32(delta + i * TILE_COLUMNS + n);
                store_some(to, output + n, count - n, p->is_y_bf16, sum);
            }
        }
    }
}

static void apply(const struct problem *p, const struct segment *s, const struct workspace *w,
                  int64_t first, int64_t num_rows)
{
    shrink(p, s, w, first, num_rows);
    for (const struct block *block = s->blocks; block < s->blocks + s->num_blocks; block++) {
        int64_t ldb = block->end_output - block->first_output;
        for (int64_t n = block->first_output; n < block->end_output; n += TILE_COLUMNS) {
            const float *b = s->b + block->first_element + n - block->first_output;
            int64_t count = block->end_output - n;
            if (count < TILE_COLUMNS) {
                for (int64_t rank = 0; rank < block->end_rank - block->first_rank; rank++) {
                    float *to = w->edge + rank * TILE_COLUMNS;
                    memset(to, 0, TILE_COLUMNS * sizeof(float));
                    memcpy(to, b + rank * ldb, (size_t)count * sizeof(float));
                }
                expand(p, s, w, first, num_rows, block, n, w->edge, TILE_COLUMNS);
            } else
                expand(p, s, w, first, num_rows, block, n, b, ldb);
        }
    }
}

static int64_t tasks_of(const struct segment *s)
{
    return round_up(s->stop - s->start, TASK_ROWS) / TASK_ROWS;
}

/* Return 0, or 1 if there was no memory: then y is not complete. */
int topwork_lora(const struct problem *p)
{
    int64_t num_tasks = 0, lora_rank = 0, rows = 0;
    int failed = 0;
    for (const struct segment *s = p->segments; s < p->segments + p->num_segments; s++) {
        num_tasks += tasks_of(s);
        lora_rank = s->lora_rank > lora_rank ? s->lora_rank : lora_rank;
        rows = s->stop - s->start > rows ? s->stop - s->start : rows;
    }
    rows = smaller(rows, TASK_ROWS);
    int num_threads = (int)smaller(p->num_threads, num_tasks);
    (void)num_threads; /* without OpenMP */
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        struct workspace w = {.width = round_up(p->num_inputs, LANES)};
        int64_t num_floats = rows * (w.width + lora_rank) + lora_rank * TILE_COLUMNS;
        w.inputs = aligned_alloc(64, (size_t)round_up(num_floats, LANES) * sizeof(float));
        w.edge = w.inputs + rows * w.width;
        w.inner = w.edge + lora_rank * TILE_COLUMNS;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_tasks; i++) {
            const struct segment *s = p->segments;
            int64_t index = i;
            for (; index >= tasks_of(s); s++)
                index -= tasks_of(s);
            int64_t first = s->start + index * TASK_ROWS;
            if (w.inputs != NULL)
                apply(p, s, &w, first, smaller(TASK_ROWS, s->stop - first));
            else
#pragma omp atomic write
                failed = 1;
        }
        free(w.inputs);
    }
    return failed;
}
