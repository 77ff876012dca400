/* What lora_shrink and lora_expand share: y = gain y + shift + B (A x), by the slot of each row.
 *
 * Two ops, for the second needs all of the A x that the first leaves in `inner`. Their tasks are
 * pieces of A or B in the order in which they lie, each for the blocks of a run's rows. A row is
 * the same alone and in any run, block and piece. Where A and B lie in float32 or bfloat16, all
 * sums and products are float32; where they lie in int8, x and A x become int8 first, and sums are
 * integers (shrink_int8.h, expand_int8.h).
 */
#ifndef TOPWORK_LORA_LORA_H
#define TOPWORK_LORA_LORA_H

#include "runtime/thread_pool.h"
#include "simd/bytes.h"

enum {
    BLOCK_ROWS = 24,        /* rows of a task; the next block finds A's or B's piece in cache */
    INT8_BLOCK_ROWS = 32,   /* likewise */
    FEW_SHARED_ROWS = 8,    /* that a linear brings into int8 itself: meeting would take longer */
    TASK_ITEMS = 16 * 1024, /* of A or B in a piece: about a microsecond of reading */
    RANK_GROUP = 4,         /* lora_ranks of A whose products share their loads */
    RANK_PANEL = 16,        /* lora_ranks of a panel of A in int8 */
    OUTPUT_GROUP = 64,      /* outputs of B, whole panels of it in int8 */
    PANEL_OUTPUTS = 32,     /* of a panel of B in int8 */
};

/* What A and B lie in. */
enum item { F32, BF16, INT8 };

/* Fields of a slot's row of the table, which holds addresses as integers, and of each module in it,
 * which stand behind. */
enum {
    SLOT_A,      /* address of [num_ranks, K], in int8 of its panels; 0: no LoRA here */
    SLOT_RANKS,  /* of all modules together */
    SLOT_GAIN,   /* address of [N] float32, or 0 */
    SLOT_SHIFT,  /* likewise */
    SLOT_SCALES, /* address of [num_ranks] float32: what 1 stands for in A times that in B; int8 */
    SLOT_FIELDS,
    MODULE_B = 0, /* address of [num_ranks, width]: B transposed; in int8 of its panels */
    MODULE_FIRST_RANK,
    MODULE_RANKS,
    MODULE_FIELDS,
};

struct lora {
    const void *x;        /* [T, K] */
    float *y;             /* [T, N]; null: the delta is added in another op */
    const int64_t *table; /* [slots, SLOT_FIELDS + MODULE_FIELDS num_modules] */
    const int64_t *module_widths;
    int64_t x_stride, y_stride, num_inputs, num_modules;
    int64_t is_bf16; /* x */
    int64_t item;    /* of A and B */
    float *inner;    /* [T, inner_stride]: A x */
    int64_t inner_stride;
    char *coded;              /* [T, coded rows' bytes]: of int8; of no meaning before */
    int64_t codes_for_linear; /* whether the linear of the same x finds its rows there, too */
};

/* Tell whether lora_shrink of a step brings all rows into int8 for the linear behind it, too. */
INLINE bool codes_all_rows(const struct lora *op, const struct step *step)
{
    return op->codes_for_linear && step->num_runs > 0 && step->num_rows > FEW_SHARED_ROWS;
}

/* Some rows of a run, and which of the pieces of A or B. */
struct task {
    const int64_t *slot; /* its row of the table; NULL: no task */
    int64_t first_row, num_rows, piece;
};

/* Where a thread stands in the runs. */
struct cursor {
    const struct run *run;
    int64_t num_before; /* tasks of the runs before this one */
    int64_t num_tasks;  /* of all runs */
};

/* Neighbouring lora_ranks or outputs. */
struct span {
    int64_t first, end;
};

typedef int64_t (*count_function)(const struct lora *, const int64_t *slot);

INLINE const void *address_in(int64_t field) { return (const void *)(uintptr_t)field; }

INLINE int64_t item_bytes(enum item item) { return item == F32 ? 4 : item == BF16 ? 2 : 1; }

INLINE enum item item_of(bool is_bf16) { return is_bf16 ? BF16 : F32; }

/* Return the address of an element of A, B or x. */
INLINE const void *element(const void *first, int64_t index, enum item item)
{
    return (const char *)first + index * item_bytes(item);
}

/* Return it, and NULL for the B of a module that has none, which may have a gain. */
INLINE const void *element_or_null(const void *first, int64_t index, enum item item)
{
    return first == NULL ? NULL : element(first, index, item);
}

/* Return the bytes that the first lora_ranks of A in int8 take, whole panels or all. */
INLINE int64_t int8_bytes_of_a(int64_t num_ranks, int64_t num_inputs)
{
    return num_ranks * round_up(num_inputs, QUAD);
}

/* Return the bytes that the first outputs of a module in int8 take, whole panels. */
INLINE int64_t int8_bytes_of_b(int64_t num_ranks, int64_t num_outputs)
{
    return round_up(num_ranks, QUAD) * num_outputs;
}

INLINE int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }

/* Return one of `num_parts` parts of a like size, a multiple of `unit`; the last may be empty. */
INLINE struct span part_of(int64_t count, int64_t num_parts, int64_t unit, int64_t index)
{
    int64_t size = round_up(parts(count, num_parts), unit), first = smaller(index * size, count);
    return (struct span){first, smaller(first + size, count)};
}

/* Return the pieces of a slot's A: lora_ranks. */
INLINE int64_t pieces_of_a(const struct lora *op, const int64_t *slot)
{
    return parts(slot[SLOT_RANKS] * op->num_inputs, TASK_ITEMS);
}

/* Return the pieces of one module's B, at least one, for it may have a gain: outputs. */
INLINE int64_t pieces_of_module(const int64_t *module, int64_t width)
{
    return parts(module[MODULE_RANKS] * width + 1, TASK_ITEMS);
}

INLINE int64_t pieces_of_b(const struct lora *op, const int64_t *slot)
{
    int64_t num_pieces = 0;
    for (int64_t i = 0; i < op->num_modules; i++)
        num_pieces +=
            pieces_of_module(slot + SLOT_FIELDS + i * MODULE_FIELDS, op->module_widths[i]);
    return num_pieces;
}

INLINE const int64_t *slot_of(const struct lora *op, const struct run *run)
{
    return op->table + run->slot * (SLOT_FIELDS + MODULE_FIELDS * op->num_modules);
}

/* Return the rows of a task. */
INLINE int64_t rows_of_block(const struct lora *op)
{
    return op->item == INT8 ? (int64_t)INT8_BLOCK_ROWS : (int64_t)BLOCK_ROWS;
}

INLINE int64_t tasks_of_run(const struct lora *op, const struct run *run, count_function count)
{
    const int64_t *slot = slot_of(op, run);
    return slot[SLOT_A] == 0 ? 0
                             : parts(run->stop - run->start, rows_of_block(op)) * count(op, slot);
}

INLINE struct cursor first_run(const struct lora *op, const struct step *step, count_function count)
{
    struct cursor cursor = {.run = step->runs};
    for (int64_t i = 0; i < step->num_runs; i++)
        cursor.num_tasks += tasks_of_run(op, step->runs + i, count);
    return cursor;
}

int64_t topwork_lora_shrink_scratch(const void *op);
void topwork_lora_shrink(const void *op, struct worker *worker);
int64_t topwork_lora_expand_scratch(const void *op);
void topwork_lora_expand(const void *op, struct worker *worker);

/* Fetch what a thread's share of lora_expand begins with. */
void fetch_share_of_b(const struct lora *op, const struct worker *worker);

/* Return a task, not before the cursor, which goes there; `count` tells the pieces of a slot.
 *
 * Tasks stand in the order in which A or B lie; the blocks of rows that share a piece are side by
 * side. */
INLINE struct task task_at(const struct lora *op, struct cursor *cursor, int64_t index,
                           count_function count)
{
    int64_t num_tasks;
    for (; index >= cursor->num_before + (num_tasks = tasks_of_run(op, cursor->run, count));
         cursor->run++)
        cursor->num_before += num_tasks;
    const struct run *run = cursor->run;
    int64_t num_rows = run->stop - run->start, num_blocks = parts(num_rows, rows_of_block(op));
    index -= cursor->num_before;
    struct span rows = part_of(num_rows, num_blocks, 1, index % num_blocks);
    return (struct task){slot_of(op, run), run->start + rows.first, rows.end - rows.first,
                         index / num_blocks};
}

/* Return the first task of a thread's own share. */
INLINE struct task first_task(const struct lora *op, const struct worker *worker,
                              count_function count)
{
    struct cursor cursor = first_run(op, worker->step, count);
    int64_t first = begin_of_share(worker, worker->index, cursor.num_tasks);
    if (first == begin_of_share(worker, worker->index + 1, cursor.num_tasks))
        return (struct task){0};
    return task_at(op, &cursor, first, count);
}

/* Take a task and say what it is, and which will follow, as far as is known; or that there is none
 * left. */
INLINE bool next_task(const struct lora *op, struct worker *worker, struct cursor *cursor,
                      count_function count, struct task *task, struct task *next)
{
    int64_t index = take_task(worker, cursor->num_tasks);
    if (index < 0)
        return false;
    if (index < cursor->num_before) { /* of another thread's share */
        cursor->run = worker->step->runs;
        cursor->num_before = 0;
    }
    *task = task_at(op, cursor, index, count);
    *next = (struct task){0};
    struct cursor ahead = *cursor;
    if (index >= begin_of_share(worker, worker->index, cursor->num_tasks)
        && index + 1 < begin_of_share(worker, worker->index + 1, cursor->num_tasks))
        *next = task_at(op, &ahead, index + 1, count);
    return true;
}

#endif
