/* How an op of a step runs: on all threads of a crew at once, which share out its tasks.
 *
 * A program is a row of ops that one call runs one after the other; the threads meet between two
 * ops, so an op may read what those before it wrote. What differs from step to step stands in
 * `struct step`; all else of an op is fixed when the program is made.
 */
#ifndef TOPWORK_CREW_H
#define TOPWORK_CREW_H

#include <stdatomic.h>
#include <stdint.h>

/* Rows [start, stop) of a step use the adapter in a slot. */
struct run {
    int64_t slot, start, stop;
};

/* A step, once for all its rows and once for those that are sampled: of these there is only
 * `positions`, which says which rows they are. */
struct step {
    int64_t num_rows, num_sequences, max_pages, num_runs;
    const int64_t *positions;  /* [num_rows] */
    const int64_t *kv_loc;     /* [num_rows]: page * page_size + offset */
    const int64_t *sequences;  /* [num_sequences, 3]: first row, rows, positions */
    const int64_t *page_table; /* [num_sequences, max_pages] */
    const struct run *runs;    /* [num_runs], in row order */
};

/* One thread's view of the op that it runs. */
struct worker {
    const struct step *step;
    _Atomic int64_t *next; /* the op's first task that nobody has taken */
    void *scratch;         /* this thread's own, 64-byte aligned, of the program's size */
};

typedef void (*op_function)(const void *op, struct worker *worker);

/* An op of a program, and whether it works on the step's rows, 0, or on those it samples, 1. */
struct entry {
    op_function run;
    const void *op;
    int64_t kind;
};

/* Take a task of the running op: a number that no other thread gets, counted from 0. */
static inline int64_t take_task(struct worker *worker)
{
    return atomic_fetch_add_explicit(worker->next, 1, memory_order_relaxed);
}

#endif
