/* The first half of a low-rank delta: A x of each row whose slot has a LoRA.
 *
 * The order in which an element is summed: LANES sums, one for each input modulo LANES, added
 * from the first to the last, then folded. Where x and A are bfloat16, one for each pair of inputs
 * modulo LANES, by the CPU's own instruction where it has one, else the second of them first.
 */
#include "lora/shrink_int8.h"
#include "lora/shrink_rows.h"

enum {
    TILE = LANES == 16 ? 6 : 3, /* rows whose sums stay in registers */
};

/* Some rows times some of A's. */
struct dots {
    const char *x; /* [rows, x_size]: vectors, no input behind the last or zeros */
    const void *a; /* [lora_ranks, num_inputs] */
    float *u;      /* of the first row and lora_rank */
    int64_t x_size, num_inputs, ldu;
    struct ahead ahead;
};

/* Add the products of one vector of inputs, from input k on. */
INLINE void add_vector(int num_rows, int num_ranks, const struct dots *d, int64_t k, int64_t count,
                       enum form form, f32v sums[TILE][RANK_GROUP])
{
    const char *x = d->x + k / inputs_of_vector(form) * vector_bytes(form);
    int64_t size = item_bytes(item_of_form(form)), ahead = k * num_ranks * size;
    for (int j = 0; j < num_ranks; j++) {
        int64_t at = j * d->num_inputs + k;
        f32v a = load_inputs(d->a, at, count, item_of_form(form), form == PAIRS);
        if (d->ahead.from != 0 && (j & d->ahead.mask) == d->ahead.phase)
            prefetch((const void *)d->ahead.from, ahead + j * inputs_of_vector(form) * size);
        for (int i = 0; i < num_rows; i++) {
            const char *row = x + i * d->x_size;
            u32v inputs = load_words(row);
            if (is_split(form)) {
                f32v first = load_f32(row + LANES * 4);
                sums[i][j] = multiply_add((f32v)inputs, second_floats((u32v)a), sums[i][j]);
                sums[i][j] = multiply_add(first, first_floats((u32v)a), sums[i][j]);
            } else {
                sums[i][j] = add_words(sums[i][j], inputs, (u32v)a, form == PAIRS);
            }
        }
    }
}

INLINE void dot_tile(int num_rows, int num_ranks, const struct dots *d, enum form form)
{
    f32v sums[TILE][RANK_GROUP];
    for (int i = 0; i < num_rows; i++)
        for (int j = 0; j < num_ranks; j++)
            sums[i][j] = (f32v){0};
    int64_t k = 0, size = inputs_of_vector(form);
    for (; k + size <= d->num_inputs; k += size)
        add_vector(num_rows, num_ranks, d, k, size, form, sums);
    if (k < d->num_inputs)
        add_vector(num_rows, num_ranks, d, k, d->num_inputs - k, form, sums);
    for (int i = 0; i < num_rows; i++)
        if (num_ranks == RANK_GROUP)
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

INLINE void dot_ranks(int64_t num_rows, struct dots d, const struct piece_of_a *piece, int64_t tile,
                      int64_t num_tiles, enum form form)
{
    int64_t rank = 0;
    for (; rank + RANK_GROUP <= piece->num_ranks; rank += RANK_GROUP) {
        d.ahead = ahead_of(piece, rank, tile, num_tiles);
        dot_rows(num_rows, RANK_GROUP, &d, form);
        d.a = element(d.a, RANK_GROUP * d.num_inputs, item_of_form(form));
        d.u += RANK_GROUP;
    }
    for (d.ahead.from = 0; rank < piece->num_ranks; rank++) {
        dot_rows(num_rows, 1, &d, form);
        d.a = element(d.a, d.num_inputs, item_of_form(form));
        d.u++;
    }
}

#define DEFINE_DOT(name, form)                                                               \
    static void name(int64_t num_rows, const struct dots *d, const struct piece_of_a *piece, \
                     int64_t tile, int64_t num_tiles)                                        \
    {                                                                                        \
        dot_ranks(num_rows, *d, piece, tile, num_tiles, form);                               \
    }
DEFINE_DOT(dot_floats, FLOATS)
DEFINE_DOT(dot_widened, WIDENED)
DEFINE_DOT(dot_pairs, PAIRS)

static void shrink(const struct lora *op, const struct task *task, const struct piece_of_a *piece,
                   char *scratch)
{
    enum form form = form_of(op);
    int64_t num_tiles = parts(task->num_rows, TILE), row = task->first_row;
    struct dots dots = {
        .a = piece->a,
        .num_inputs = op->num_inputs,
        .ldu = op->inner_stride,
    };
    for (int64_t tile = 0, num_rows; tile < num_tiles; tile++, row += num_rows) {
        num_rows = parts(task->first_row + task->num_rows - row, num_tiles - tile);
        dots.u = op->inner + row * op->inner_stride + piece->first_rank;
        dots.x = element(op->x, row * op->x_stride, item_of(op->is_bf16));
        dots.x_size = op->x_stride * (op->is_bf16 ? 2 : 4);
        if (!is_ready(op)) {
            dots.x = scratch;
            dots.x_size = scratch_row(op);
            for (int64_t i = 0; i < num_rows; i++)
                copy_row(op, row + i, scratch + i * dots.x_size);
        }
        switch (form) {
        case FLOATS: dot_floats(num_rows, &dots, piece, tile, num_tiles); break;
        case WIDENED: dot_widened(num_rows, &dots, piece, tile, num_tiles); break;
        case PAIRS: dot_pairs(num_rows, &dots, piece, tile, num_tiles); break;
        }
    }
}

int64_t topwork_lora_shrink_scratch(const void *pointer)
{
    const struct lora *op = pointer;
    if (op->item == INT8)
        return int8_shrink_scratch(op);
    return is_ready(op) ? 0 : TILE * scratch_row(op);
}

void topwork_lora_shrink(const void *pointer, struct worker *worker)
{
    const struct lora *op = pointer;
    struct cursor cursor = first_run(op, worker->step, pieces_of_a);
    struct code_cursor coded = {0};
    struct tile_rows told = {0};
    struct task task, next;
    if (op->item == INT8)
        coded = code_runs(op, worker);
    while (next_task(op, worker, &cursor, pieces_of_a, &task, &next)) {
        struct piece_of_a piece = piece_of_a(op, &task, &next);
        if (op->item == INT8)
            shrink_int8(op, &task, &piece, coded_block(op, &task, &coded), &told, worker->scratch);
        else
            shrink(op, &task, &piece, worker->scratch);
    }
    if (told.first > 0)
        release_tiles();
    if (op->y != NULL)                /* else it is added in another op */
        fetch_share_of_b(op, worker); /* while the others finish */
}
