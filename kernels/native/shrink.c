/* The first half of a low-rank delta: A x of each row whose slot has a LoRA.
 *
 * Owns the order in which an element is summed: LANES sums, one for each input modulo LANES, added
 * from the first to the last, then folded. Where x and A are bfloat16, one for each pair of inputs
 * modulo LANES, by the CPU's own instruction where it has one.
 */
#include "delta.h"
#include "words.h"

enum {
    TILE_RANKS = 4,           /* of A, whose products share their loads */
    FEW_ROWS = 8,             /* so few that reading A is the work */
    LEAST_RANKS = 32,         /* of a piece with more rows, each of which it copies */
    PREFETCH_ROWS = TILE / 2, /* of a tile, so few that reading A holds them up */
    AHEAD_BYTES = 8192,       /* of A that are fetched for them before their use */
};

/* Return the lora_ranks that a piece of A has. */
INLINE int64_t ranks_of_piece(const struct lora *op, int64_t num_rows)
{
    int64_t ranks = round_up(parts(TASK_ITEMS, op->num_inputs), TILE_RANKS);
    return num_rows > FEW_ROWS && ranks < LEAST_RANKS ? LEAST_RANKS : ranks;
}

static int64_t pieces_of_a(const struct lora *op, const struct line *line, int64_t num_rows)
{
    return parts(line->num_ranks, ranks_of_piece(op, num_rows));
}

/* What a vector holds: of x and A LANES floats each, A's perhaps widened, or pairs of bfloat16. */
enum form { FLOATS, WIDENED, PAIRS };

INLINE enum form form_of(const struct lora *op)
{
    return !op->is_lora_bf16 ? FLOATS : op->is_bf16 ? PAIRS : WIDENED;
}

INLINE int64_t inputs_of_vector(enum form form) { return form == PAIRS ? 2 * LANES : LANES; }

/* Return up to a vector of inputs, of which there are `count` more; zeros behind them. */
INLINE f32v load_inputs(const void *from, int64_t first, int64_t count, bool is_bf16, bool in_pairs)
{
    if (!in_pairs)
        return load_some(from, first, count, is_bf16);
    f32v pairs = {0};
    memcpy(&pairs, element(from, first, true), (size_t)smaller(count, 2 * LANES) * 2);
    return pairs;
}

/* Some rows times some of A's. */
struct dots {
    const float *x; /* [rows, x_stride]: vectors, zeros past the inputs */
    const void *a;  /* [lora_ranks, num_inputs] */
    float *u;       /* of the first row and lora_rank */
    int64_t x_stride, num_inputs, ldu;
};

/* Add the products of one vector of inputs, from input k on. */
INLINE void add_vector(int num_rows, int num_ranks, const struct dots *d, int64_t k, int64_t count,
                       enum form form, f32v sums[TILE][TILE_RANKS])
{
    const float *x = d->x + (form == PAIRS ? k / 2 : k);
    /* In the order in which A lies, which the CPU itself learns to run ahead of. */
    const void *ahead = element((const char *)d->a + AHEAD_BYTES, k * num_ranks, form != FLOATS);
    for (int j = 0; j < num_ranks; j++) {
        f32v a = load_inputs(d->a, j * d->num_inputs + k, count, form == WIDENED, form == PAIRS);
        if (num_rows <= PREFETCH_ROWS)
            __builtin_prefetch(element(ahead, j * inputs_of_vector(form), form != FLOATS));
        for (int i = 0; i < num_rows; i++) {
            u32v inputs = (u32v)load_f32(x + i * d->x_stride);
            sums[i][j] = add_words(sums[i][j], inputs, (u32v)a, form == PAIRS);
        }
    }
}

INLINE void dot_tile(int num_rows, int num_ranks, const struct dots *d, enum form form)
{
    f32v sums[TILE][TILE_RANKS];
    for (int i = 0; i < num_rows; i++)
        for (int j = 0; j < num_ranks; j++)
            sums[i][j] = (f32v){0};
    int64_t k = 0, size = inputs_of_vector(form);
    for (; k + size <= d->num_inputs; k += size)
        add_vector(num_rows, num_ranks, d, k, size, form, sums);
    if (k < d->num_inputs)
        add_vector(num_rows, num_ranks, d, k, d->num_inputs - k, form, sums);
    for (int i = 0; i < num_rows; i++)
        if (num_ranks == TILE_RANKS)
            sum_lanes_of_four(sums[i], d->u + i * d->ldu);
        else
            for (int j = 0; j < num_ranks; j++)
                d->u[i * d->ldu + j] = sum_lanes(sums[i][j]);
}

INLINE void dot_rows(int64_t num_rows, int num_ranks, const struct dots *d, enum form form)
{
    switch (num_rows) {
    case 1: dot_tile(1, num_ranks, d, form); break;
    case 2: dot_tile(2, num_ranks, d, form); break;
    case 3: dot_tile(3, num_ranks, d, form); break;
#if LANES == 16
    case 4: dot_tile(4, num_ranks, d, form); break;
    case 5: dot_tile(5, num_ranks, d, form); break;
    case 6: dot_tile(6, num_ranks, d, form); break;
#endif
    }
}

/* Do `count` lora_ranks, of which `d` has the first. */
INLINE void dot_ranks(int64_t num_rows, int64_t count, struct dots d, enum form form)
{
    for (; count >= TILE_RANKS; count -= TILE_RANKS) {
        dot_rows(num_rows, TILE_RANKS, &d, form);
        d.a = element(d.a, TILE_RANKS * d.num_inputs, form != FLOATS);
        d.u += TILE_RANKS;
    }
    for (; count > 0; count--) {
        dot_rows(num_rows, 1, &d, form);
        d.a = element(d.a, d.num_inputs, form != FLOATS);
        d.u++;
    }
}

static void dot_floats(int64_t num_rows, int64_t count, struct dots d)
{
    dot_ranks(num_rows, count, d, FLOATS);
}

static void dot_widened(int64_t num_rows, int64_t count, struct dots d)
{
    dot_ranks(num_rows, count, d, WIDENED);
}

static void dot_pairs(int64_t num_rows, int64_t count, struct dots d)
{
    dot_ranks(num_rows, count, d, PAIRS);
}

/* Return how far apart rows of x lie in scratch memory. */
INLINE int64_t scratch_stride(const struct lora *op)
{
    int64_t size = inputs_of_vector(form_of(op));
    return parts(op->num_inputs, size) * LANES;
}

static void shrink(const struct lora *op, const struct task *task, int64_t first, int64_t end,
                   float *inputs)
{
    enum form form = form_of(op);
    int64_t num_inputs = op->num_inputs, x_stride = scratch_stride(op);
    int64_t size = inputs_of_vector(form);
    for (int64_t start = 0; start < task->num_rows; start += TILE) {
        int64_t num_rows = smaller(TILE, task->num_rows - start), row = task->first_row + start;
        for (int64_t i = 0; i < num_rows; i++)
            for (int64_t k = 0; k < num_inputs; k += size)
                store_f32(inputs + i * x_stride + k / size * LANES,
                          load_inputs(op->x, (row + i) * op->x_stride + k, num_inputs - k,
                                      op->is_bf16, form == PAIRS));
        struct dots dots = {
            .x = inputs,
            .a = element(task->line->a, first * num_inputs, form != FLOATS),
            .u = op->inner + row * op->inner_stride + first,
            .x_stride = x_stride,
            .num_inputs = num_inputs,
            .ldu = op->inner_stride,
        };
        switch (form) {
        case FLOATS: dot_floats(num_rows, end - first, dots); break;
        case WIDENED: dot_widened(num_rows, end - first, dots); break;
        case PAIRS: dot_pairs(num_rows, end - first, dots); break;
        }
    }
}

int64_t topwork_lora_shrink_scratch(const struct lora *op)
{
    return TILE * scratch_stride(op) * (int64_t)sizeof(float);
}

void topwork_lora_shrink(const struct lora *op, struct worker *worker)
{
    struct cursor cursor = first_run(op, worker->step, pieces_of_a);
    struct task task;
    while (next_task(op, worker, &cursor, pieces_of_a, &task)) {
        int64_t num_rows = cursor.run->stop - cursor.run->start;
        int64_t ranks = ranks_of_piece(op, num_rows), first = task.piece * ranks;
        shrink(op, &task, first, smaller(first + ranks, task.line->num_ranks), worker->scratch);
    }
}
