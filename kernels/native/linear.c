/* A linear layer whose weights stand in panels of 32 outputs, in the order in which they are read.
 *
 * Owns the order in which an output is summed: its bias, then one product after the other, from
 * the first input to the last; in bfloat16 two inputs at a time, by the CPU's own instruction where
 * it has one. Every row does the same operations whatever stands beside it. Knows nothing of what a
 * layer is for.
 */
#include "crew.h"
#include "words.h"

enum {
    PANEL = 32,                        /* outputs */
    MAX_TILE = LANES == 16 ? 12 : 4,   /* rows whose sums stay in registers, two vectors each */
    BLOCK_BYTES = 512 * 1024,          /* of x, which stay in a core's cache for all panels */
    AHEAD = 16,                        /* steps of a panel that are fetched before their use */
};

struct linear {
    const void *x;      /* [T, K] */
    const void *weight; /* [panels, K, 32] float32, or [panels, K / 2, 32, 2] bfloat16 */
    const float *bias;  /* [N], or null */
    float *y;           /* [T, N] */
    int64_t x_stride, y_stride, num_inputs, num_outputs, is_bf16;
};

INLINE u32v splat_word(const char *from)
{
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word - (u32v){0};
}

/* Sum a tile of rows for two vectors of a panel; a step is one float32 or one pair of bfloat16. */
INLINE void multiply_tile(int num_rows, bool is_bf16, const char *x, int64_t row_size,
                          const char *panel, int64_t num_steps, f32v sums[][2])
{
    for (int64_t k = 0; k < num_steps; k++) {
        const char *weights = panel + k * PANEL * 4;
        for (int i = 0; i < TILE_COLUMNS * 4; i += 64)
            __builtin_prefetch(weights + AHEAD * PANEL * 4 + i);
        u32v left = load_words((const uint32_t *)weights);
        u32v right = load_words((const uint32_t *)weights + LANES);
#pragma GCC unroll 12
        for (int row = 0; row < num_rows; row++) {
            u32v inputs = splat_word(x + row * row_size + k * 4);
            sums[row][0] = add_words(sums[row][0], inputs, left, is_bf16);
            sums[row][1] = add_words(sums[row][1], inputs, right, is_bf16);
        }
    }
}

INLINE void tile(int num_rows, bool is_bf16, const char *x, int64_t row_size, const char *panel,
                 int64_t num_steps, const float *bias, float *y, int64_t y_stride,
                 int64_t num_outputs)
{
    f32v sums[MAX_TILE][2];
#pragma GCC unroll 12
    for (int row = 0; row < num_rows; row++) {
        sums[row][0] = load_f32(bias);
        sums[row][1] = load_f32(bias + LANES);
    }
    multiply_tile(num_rows, is_bf16, x, row_size, panel, num_steps, sums);
#pragma GCC unroll 12
    for (int row = 0; row < num_rows; row++)
        if (num_outputs >= TILE_COLUMNS) {
            store_f32(y + row * y_stride, sums[row][0]);
            store_f32(y + row * y_stride + LANES, sums[row][1]);
        } else {
            store_some(y + row * y_stride, 0, num_outputs, false, sums[row][0]);
            if (num_outputs > LANES)
                store_some(y + row * y_stride, LANES, num_outputs - LANES, false, sums[row][1]);
        }
}

INLINE void some_rows(int64_t num_rows, bool is_bf16, const char *x, int64_t row_size,
                      const char *panel, int64_t num_steps, const float *bias, float *y,
                      int64_t y_stride, int64_t num_outputs)
{
#define ROWS(n)                                                                               \
    case n:                                                                                   \
        tile(n, is_bf16, x, row_size, panel, num_steps, bias, y, y_stride, num_outputs);      \
        break;
    switch (num_rows) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#if LANES == 16
        ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
    }
#undef ROWS
}

static void rows_bf16(int64_t num_rows, const char *x, int64_t row_size, const char *panel,
                      int64_t num_steps, const float *bias, float *y, int64_t y_stride,
                      int64_t num_outputs)
{
    some_rows(num_rows, true, x, row_size, panel, num_steps, bias, y, y_stride, num_outputs);
}

static void rows_f32(int64_t num_rows, const char *x, int64_t row_size, const char *panel,
                     int64_t num_steps, const float *bias, float *y, int64_t y_stride,
                     int64_t num_outputs)
{
    some_rows(num_rows, false, x, row_size, panel, num_steps, bias, y, y_stride, num_outputs);
}

/* Return how many rows of x a core works on for all panels. */
INLINE int64_t block_rows(const struct linear *p)
{
    int64_t rows = BLOCK_BYTES / (p->num_inputs * (p->is_bf16 ? 2 : 4)) / MAX_TILE * MAX_TILE;
    return rows > MAX_TILE ? rows : MAX_TILE;
}

INLINE bool has_half_pair(const struct linear *p) { return p->is_bf16 && p->num_inputs % 2; }

int64_t topwork_linear_scratch(const void *op)
{
    const struct linear *p = op;
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

static void multiply_block(const struct linear *p, int64_t first_row, int64_t end_row,
                           int64_t panel, char *scratch)
{
    int64_t num_steps = p->is_bf16 ? (p->num_inputs + 1) / 2 : p->num_inputs;
    int64_t first = panel * PANEL, num_outputs = smaller(PANEL, p->num_outputs - first);
    const char *weights = (const char *)p->weight + panel * num_steps * PANEL * 4;
    float bias[PANEL] = {0};
    if (p->bias != NULL)
        memcpy(bias, p->bias + first, (size_t)num_outputs * sizeof(float));
    int64_t num_tiles = round_up(end_row - first_row, MAX_TILE) / MAX_TILE;
    for (int64_t tile = 0, row = first_row; tile < num_tiles; tile++) {
        int64_t num_rows = (end_row - row + num_tiles - tile - 1) / (num_tiles - tile);
        int64_t row_size = p->x_stride * (p->is_bf16 ? 2 : 4);
        const char *x = (const char *)p->x + row * row_size;
        if (has_half_pair(p)) {
            x = padded(p, x, num_rows, scratch);
            row_size = (p->num_inputs + 1) * 2;
        }
        float *y = p->y + row * p->y_stride + first;
        for (int64_t i = 0; i < num_outputs; i += TILE_COLUMNS)
            (p->is_bf16 ? rows_bf16 : rows_f32)(num_rows, x, row_size, weights + i * 4, num_steps,
                                                bias + i, y + i, p->y_stride, num_outputs - i);
        row += num_rows;
    }
}

/* A task is one panel for one block of rows; blocks come one after the other. */
void topwork_linear(const void *op, struct worker *worker)
{
    const struct linear *p = op;
    int64_t num_rows = worker->step->num_rows, rows = block_rows(p);
    int64_t num_panels = round_up(p->num_outputs, PANEL) / PANEL;
    int64_t num_tasks = round_up(num_rows, rows) / rows * num_panels;
    for (int64_t task; (task = take_task(worker, num_tasks)) >= 0;) {
        int64_t first = task / num_panels * rows;
        multiply_block(p, first, smaller(first + rows, num_rows), task % num_panels,
                       worker->scratch);
    }
}
