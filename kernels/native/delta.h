/* What lora_shrink and lora_expand share: y = gain y + shift + B (A x), by the slot of each row.
 *
 * Two ops, for the second needs all of the A x that the first leaves in `inner`. Owns their form
 * and how their tasks are dealt out: a run's rows in blocks, each in pieces of A or B. A and B
 * may lie in bfloat16; all sums and products are float32, and a row is the same alone and in any
 * run, block and piece. Knows nothing of adapters beyond a table of addresses.
 */
#ifndef TOPWORK_DELTA_H
#define TOPWORK_DELTA_H

#include "crew.h"
#include "vector.h"

enum {
    TILE = LANES == 16 ? 6 : 3, /* rows whose sums stay in registers */
    BLOCK_ROWS = 48,            /* rows for which A and B come from memory once */
    TASK_ITEMS = 32 * 1024,     /* of A or B in a piece: a few microseconds of reading */
};

/* What the table tells of one module of a slot. */
struct module {
    const void *b; /* [num_ranks, width]: B transposed */
    int64_t first_rank, num_ranks;
};

/* What it tells of a slot. */
struct line {
    const void *a; /* [num_ranks, K]; NULL: no LoRA here */
    int64_t num_ranks;
    const float *gain, *shift; /* [N], or NULL */
    struct module modules[];
};

struct lora {
    const void *x; /* [T, K] */
    float *y;      /* [T, N] */
    const int64_t *table, *module_widths;
    int64_t x_stride, y_stride, num_inputs, num_modules;
    int64_t is_bf16, is_lora_bf16; /* x; A and B */
    float *inner; /* [T, inner_stride]: A x */
    int64_t inner_stride;
};

/* Some rows of a run, and which of the pieces of A or B. */
struct task {
    const struct line *line;
    int64_t first_row, num_rows, piece;
};

/* Where a thread stands in the runs. */
struct cursor {
    const struct run *run;
    int64_t num_before; /* tasks of the runs before this one */
    int64_t num_tasks;  /* of all runs */
};

typedef int64_t (*count_function)(const struct lora *, const struct line *, int64_t num_rows);

/* Return the address of an element of A or B. */
INLINE const void *element(const void *first, int64_t index, bool is_bf16)
{
    return (const char *)first + index * (is_bf16 ? 2 : 4);
}

INLINE int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }

INLINE const struct line *line_of(const struct lora *op, const struct run *run)
{
    return (const struct line *)(op->table + run->slot * (4 + 3 * op->num_modules));
}

/* Return the pieces of A or B that a run's rows need. */
INLINE int64_t pieces_of_run(const struct lora *op, const struct run *run, count_function count)
{
    const struct line *line = line_of(op, run);
    return line->a == NULL ? 0 : count(op, line, run->stop - run->start);
}

INLINE int64_t tasks_of_run(const struct lora *op, const struct run *run, count_function count)
{
    return parts(run->stop - run->start, BLOCK_ROWS) * pieces_of_run(op, run, count);
}

INLINE struct cursor first_run(const struct lora *op, const struct step *step, count_function count)
{
    struct cursor cursor = {.run = step->runs};
    for (int64_t i = 0; i < step->num_runs; i++)
        cursor.num_tasks += tasks_of_run(op, step->runs + i, count);
    return cursor;
}

/* Take a task and say what it is, or that there is none left; `count` tells a run's pieces. */
INLINE bool next_task(const struct lora *op, struct worker *worker, struct cursor *cursor,
                      count_function count, struct task *task)
{
    int64_t index = take_task(worker, cursor->num_tasks), num_tasks;
    if (index < 0)
        return false;
    if (index < cursor->num_before) { /* of another thread's share */
        cursor->run = worker->step->runs;
        cursor->num_before = 0;
    }
    for (; index >= cursor->num_before + (num_tasks = tasks_of_run(op, cursor->run, count));
         cursor->run++)
        cursor->num_before += num_tasks;
    const struct run *run = cursor->run;
    int64_t num_pieces = pieces_of_run(op, run, count);
    index -= cursor->num_before;
    int64_t row = run->start + index / num_pieces * BLOCK_ROWS;
    *task = (struct task){line_of(op, run), row, smaller(BLOCK_ROWS, run->stop - row),
                          index % num_pieces};
    return true;
}

#endif
