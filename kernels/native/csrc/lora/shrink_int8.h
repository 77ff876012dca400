/* lora_shrink where A lies in int8: rows become int8 as those of linears do, sums are integers. */
#ifndef TOPWORK_LORA_SHRINK_INT8_H
#define TOPWORK_LORA_SHRINK_INT8_H

#include "lora/rank_tiles.h"

enum {
    FEW_CODED_ROWS = 16, /* of all runs, that each thread brings into int8 for itself */
};

INLINE struct coded_form form_of_rows(const struct lora *op)
{
    return coded_form(op->num_inputs, true);
}

/* Return how many bytes of memory `coded` has for each row. */
int64_t topwork_lora_coded_row_bytes(const void *op)
{
    return memory_of_coded_row(((const struct lora *)op)->num_inputs, true);
}

INLINE int64_t int8_shrink_scratch(const struct lora *op)
{
    int64_t numbers = num_groups(op->num_inputs) * GROUP * (int64_t)sizeof(float);
    return RANK_TILING + FEW_CODED_ROWS * form_of_rows(op).row_bytes + numbers;
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

/* Bring all rows of a step into int8, each thread a share of them. */
static struct code_cursor code_all(const struct lora *op, const struct worker *worker,
                                   float *numbers)
{
    int64_t num_rows = worker->step->num_rows;
    int64_t first = begin_of_share(worker, worker->index, num_rows);
    int64_t end = begin_of_share(worker, worker->index + 1, num_rows);
    code_rows(op, first, end, op->coded + first * form_of_rows(op).row_bytes, numbers);
    topwork_meet(worker);
    return (struct code_cursor){.rows = op->coded};
}

/* Bring the rows of all runs into int8, unless they are few. */
static struct code_cursor code_runs(const struct lora *op, const struct worker *worker)
{
    const struct run *runs = worker->step->runs;
    int64_t num_runs = worker->step->num_runs, num_rows = 0;
    struct code_cursor few = {.rows = (char *)worker->scratch + RANK_TILING};
    int64_t row_bytes = form_of_rows(op).row_bytes;
    few.numbers = (float *)(few.rows + FEW_CODED_ROWS * row_bytes);
    if (codes_all_rows(op, worker->step))
        return code_all(op, worker, few.numbers);
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

/* Do some rows for the panels of a piece, with as much memory as RANK_TILING says. */
static void shrink_int8(const struct lora *op, const struct task *task,
                        const struct piece_of_a *piece, const char *rows, struct tile_rows *told,
                        char *memory)
{
    struct coded_form form = form_of_rows(op);
    const float *scales = address_in(task->slot[SLOT_SCALES]);
    struct pair_task t = {
        .x = rows,
        .form = form,
        .end_of_a = a_of(op, task, 0) + int8_bytes_of_a(task->slot[SLOT_RANKS], op->num_inputs),
        .num_rows = task->num_rows,
        .num_inputs = op->num_inputs,
        .ldu = op->inner_stride,
        .are_fetched = true,
    };
    for (int64_t rank = 0; rank < piece->num_ranks; rank += PAIR_RANKS) {
        int64_t first = piece->first_rank + rank, behind = rank + PAIR_RANKS;
        t.pair = pair_at(piece->a, piece->num_ranks, rank, op->num_inputs);
        t.next = behind < piece->num_ranks
                     ? pair_at(piece->a, piece->num_ranks, behind, op->num_inputs)
                     : pair_at(piece->next, piece->num_next, 0, op->num_inputs);
        t.scales = scales + first;
        t.u = op->inner + task->first_row * op->inner_stride + first;
        if (task->num_rows > FEW_FOR_RANK_TILES && may_use_byte_tiles())
            multiply_pair_in_tiles(&t, told, memory);
        else
            multiply_pair(t);
    }
}

#endif
