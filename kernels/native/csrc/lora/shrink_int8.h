/* lora_shrink where A lies in int8: rows become int8 as those of linears do, sums are integers.
 *
 * A's rows have been rotated as the rows of x are (linear/quantized_rows.h). An element is
 * float(sum of the products of codes) * the row's scale * the lora_rank's, each rounded by itself:
 * the same bits on all machines.
 */
#ifndef TOPWORK_LORA_SHRINK_INT8_H
#define TOPWORK_LORA_SHRINK_INT8_H

#include "linear/quantized_rows.h"
#include "lora/piece_of_a.h"

enum {
    FEW_CODED_ROWS = 16,  /* of all runs, that each thread brings into int8 for itself */
    CODES = LANES * QUAD, /* of a vector */
    CODED_TILE = LANES == 16 ? 6 : 2, /* rows whose sums stay in registers */
};

INLINE struct coded_form form_of_rows(const struct lora *op)
{
    return coded_form(op->num_inputs, true, true);
}

/* Return how many bytes of memory `coded` has for each row. */
int64_t topwork_lora_coded_row_bytes(const void *op) { return form_of_rows(op).row_bytes; }

INLINE int64_t int8_shrink_scratch(const struct lora *op)
{
    int64_t numbers = num_groups(op->num_inputs) * GROUP * (int64_t)sizeof(float);
    return FEW_CODED_ROWS * form_of_rows(op).row_bytes + numbers;
}

/* Where a thread finds rows in int8. */
struct code_cursor {
    char *rows;     /* the step's; or, where there are few, a block of them */
    float *numbers; /* memory for those of a row; NULL: all rows are in int8 */
    int64_t first_row, num_rows;
};

static void code_rows(const struct lora *op, int64_t first_row, int64_t end_row, char *to,
                      float *numbers)
{
    struct coded_form form = form_of_rows(op);
    int64_t row_size = op->x_stride * (op->is_bf16 ? 2 : 4);
    for (int64_t row = first_row; row < end_row; row++, to += form.row_bytes) {
        struct plain_row plain = {(const char *)op->x + row * row_size, op->num_inputs, op->is_bf16,
                                  true};
        code_row(numbers, load_row(&plain, numbers), op->num_inputs, &form, to);
    }
}

/* Bring the rows of all runs into int8, unless they are few. */
static struct code_cursor code_runs(const struct lora *op, const struct worker *worker)
{
    const struct run *runs = worker->step->runs;
    int64_t num_runs = worker->step->num_runs, num_rows = 0;
    struct code_cursor few = {.rows = worker->scratch};
    int64_t row_bytes = form_of_rows(op).row_bytes;
    few.numbers = (float *)(few.rows + FEW_CODED_ROWS * row_bytes);
    for (int64_t i = 0; i < num_runs; i++)
        num_rows += runs[i].stop - runs[i].start;
    if (num_rows <= FEW_CODED_ROWS)
        return few;
    int64_t first = begin_of_share(worker, worker->index, num_rows), before = 0;
    int64_t end = begin_of_share(worker, worker->index + 1, num_rows);
    for (int64_t i = 0; i < num_runs; before += runs[i].stop - runs[i].start, i++) {
        int64_t from = runs[i].start + (first > before ? first - before : 0);
        int64_t to = smaller(runs[i].stop, runs[i].start + end - before);
        code_rows(op, from, to, op->coded + from * row_bytes, few.numbers);
    }
    topwork_meet(worker);
    return (struct code_cursor){.rows = op->coded};
}

/* Return the rows of a task in int8. */
static const char *coded_block(const struct lora *op, const struct task *task,
                               struct code_cursor *cursor)
{
    if (cursor->numbers == NULL)
        return cursor->rows + task->first_row * form_of_rows(op).row_bytes;
    if (cursor->first_row != task->first_row || cursor->num_rows != task->num_rows) {
        code_rows(op, task->first_row, task->first_row + task->num_rows, cursor->rows,
                  cursor->numbers);
        cursor->first_row = task->first_row;
        cursor->num_rows = task->num_rows;
    }
    return cursor->rows;
}

/* Some rows times some of A's. */
struct code_dots {
    const char *x; /* [rows, the form's] */
    struct coded_form form;
    const char *a;       /* [lora_ranks, num_inputs] */
    const float *scales; /* of the first lora_rank */
    float *u;            /* of the first row and lora_rank */
    int64_t num_inputs, ldu;
    struct ahead ahead;
};

/* Load up to CODES codes; zeros past `count`. */
INLINE u32v load_codes(const char *from, int64_t count)
{
    u32v codes = {0};
    if (count >= CODES)
        return load_words(from);
    memcpy(&codes, from, (size_t)count);
    return codes;
}

/* Add the products of one vector of inputs, from input k on. */
INLINE void add_codes(int num_rows, int num_ranks, const struct code_dots *d, int64_t k,
                      int64_t count, i32v sums[CODED_TILE][RANK_GROUP])
{
    u32v a[RANK_GROUP];
    for (int j = 0; j < num_ranks; j++) {
        a[j] = load_codes(d->a + j * d->num_inputs + k, count);
        if (d->ahead.from != 0 && (j & d->ahead.mask) == d->ahead.phase)
            prefetch((const void *)d->ahead.from, k * num_ranks + j * CODES);
    }
    for (int i = 0; i < num_rows; i++) {
        struct quad x = with_sizes(load_words(d->x + i * d->form.row_bytes + k));
        for (int j = 0; j < num_ranks; j++)
            sums[i][j] = dot_quads(sums[i][j], x, a[j]);
    }
}

INLINE void store_codes_sums(int num_rows, int num_ranks, const struct code_dots *d,
                             i32v sums[CODED_TILE][RANK_GROUP])
{
    for (int i = 0; i < num_rows; i++) {
        struct scaled_row row;
        memcpy(&row, d->x + i * d->form.row_bytes + d->form.code_bytes, sizeof row);
        float *u = d->u + i * d->ldu;
        int32_t totals[RANK_GROUP];
        if (num_ranks == RANK_GROUP)
            sum_words_of_four(sums[i], totals);
        else
            for (int j = 0; j < num_ranks; j++)
                totals[j] = sum_of_words(sums[i][j]);
        for (int j = 0; j < num_ranks; j++) {
            /* Unsigned: what dot products add to it may go beyond 31 bits, and is taken off. */
            int32_t total =
                (int32_t)((uint32_t)totals[j] - (uint32_t)DOT_SHIFT * (uint32_t)row.sum);
            u[j] = (float)total * row.scale * d->scales[j];
        }
    }
}

INLINE void dot_code_tile(int num_rows, int num_ranks, const struct code_dots *d)
{
    i32v sums[CODED_TILE][RANK_GROUP];
    for (int i = 0; i < num_rows; i++)
        for (int j = 0; j < num_ranks; j++)
            sums[i][j] = (i32v){0};
    int64_t k = 0;
    for (; k + CODES <= d->num_inputs; k += CODES)
        add_codes(num_rows, num_ranks, d, k, CODES, sums);
    if (k < d->num_inputs)
        add_codes(num_rows, num_ranks, d, k, d->num_inputs - k, sums);
    store_codes_sums(num_rows, num_ranks, d, sums);
}

INLINE void dot_code_rows(int64_t num_rows, int num_ranks, const struct code_dots *d)
{
    switch (num_rows) {
    case 1: dot_code_tile(1, num_ranks, d); break;
    case 2: dot_code_tile(2, num_ranks, d); break;
#if LANES == 16
    case 3: dot_code_tile(3, num_ranks, d); break;
    case 4: dot_code_tile(4, num_ranks, d); break;
    case 5: dot_code_tile(5, num_ranks, d); break;
    case 6: dot_code_tile(6, num_ranks, d); break;
#endif
    }
}

static void dot_codes(int64_t num_rows, struct code_dots d, const struct piece_of_a *piece,
                      int64_t tile, int64_t num_tiles)
{
    int64_t rank = 0;
    for (; rank + RANK_GROUP <= piece->num_ranks; rank += RANK_GROUP) {
        d.ahead = ahead_of(piece, rank, tile, num_tiles);
        dot_code_rows(num_rows, RANK_GROUP, &d);
        d.a += RANK_GROUP * d.num_inputs;
        d.u += RANK_GROUP;
        d.scales += RANK_GROUP;
    }
    for (d.ahead.from = 0; rank < piece->num_ranks; rank++) {
        dot_code_rows(num_rows, 1, &d);
        d.a += d.num_inputs;
        d.u++;
        d.scales++;
    }
}

static void shrink_int8(const struct lora *op, const struct task *task,
                        const struct piece_of_a *piece, const char *rows)
{
    int64_t num_tiles = parts(task->num_rows, CODED_TILE), row = 0;
    const float *scales = address_in(task->slot[SLOT_SCALES]);
    struct code_dots dots = {
        .form = form_of_rows(op),
        .a = piece->a,
        .scales = scales + piece->first_rank,
        .num_inputs = op->num_inputs,
        .ldu = op->inner_stride,
    };
    for (int64_t tile = 0, num_rows; tile < num_tiles; tile++, row += num_rows) {
        num_rows = parts(task->num_rows - row, num_tiles - tile);
        dots.x = rows + row * dots.form.row_bytes;
        dots.u = op->inner + (task->first_row + row) * op->inner_stride + piece->first_rank;
        dot_codes(num_rows, dots, piece, tile, num_tiles);
    }
}

#endif
