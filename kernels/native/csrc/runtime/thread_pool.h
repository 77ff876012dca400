/* How an op of a step runs: on all threads of a pool at once, which share out its tasks.
 *
 * A program is a row of ops that one call runs one after the other; between two ops the threads
 * pass a barrier, so an op may read what those before it wrote, unless it is joined to that. What
 * differs from step to step stands in `struct step`; all else of an op is fixed when the program is
 * made.
 */
#ifndef TOPWORK_RUNTIME_THREAD_POOL_H
#define TOPWORK_RUNTIME_THREAD_POOL_H

#include <stdatomic.h>
#include <stdint.h>

/* Rows [start, stop) of a step use the adapter in a slot. */
struct run {
    int64_t slot, start, stop;
};

/* Rows [start, stop) of a step are one sequence's, whose states lie in a page of every pool of
 * states; if it is new they are zero, and what the page holds is not read. */
struct state_run {
    int64_t start, stop, page, is_new;
};

/* A step, once for all its rows, once for those that are sampled, of which there is only
 * `positions`, which says which rows they are, and once for all its rows in layers with pages of
 * their own. */
struct step {
    int64_t num_rows, num_sequences, max_pages, num_runs;
    const int64_t *positions;  /* [num_rows] */
    const int64_t *kv_loc;     /* [num_rows]: page * page_size + offset */
    const int64_t *sequences;  /* [num_sequences, 3]: first row, rows, positions */
    const int64_t *page_table; /* [num_sequences, max_pages] */
    const struct run *runs;    /* [num_runs], in row order */
    int64_t num_state_runs;
    const struct state_run *state_runs; /* [num_state_runs], of different pages */
};

/* The tasks of an op that are a thread's to begin with; it has a cache line of its own. */
struct share {
    _Alignas(64) _Atomic uint64_t taken; /* at its begin, in 32 bits, and above them at its end */
};

/* One thread's view of the op that it runs. */
struct worker {
    const struct step *step;
    struct share *shares; /* [num_threads] */
    int64_t index, num_threads;
    int64_t is_halted; /* an op sets it to end the program, on all threads, after itself */
    void *scratch;     /* this thread's own, 64-byte aligned, of the program's size */
    struct thread_pool *pool;
};

/* Return when all threads that run the op have come here, and see what each has written: either
 * all of them come, or none. */
void topwork_meet(const struct worker *worker);

typedef void (*op_function)(const void *op, struct worker *worker);

/* An op of a program, and whether it works on the step's rows, 0, on those it samples, 1, or on
 * the rows in layers with pages of their own, 2. */
struct entry {
    op_function run;
    const void *op;
    int64_t kind;
    int64_t rows_each; /* that the op sees for each of them: k for pairs of rows and experts */
    /* A thread goes on to the next op without waiting for the others: neither op reads or writes
     * what the other writes. The next is not joined to the one behind it, and this one does not
     * halt the program. */
    int64_t is_joined;
};

/* Return the first of the tasks of a thread. */
static inline int64_t begin_of_share(const struct worker *worker, int64_t index, int64_t num_tasks)
{
    return num_tasks * index / worker->num_threads;
}

/* Take one of the running op's tasks, numbers below `num_tasks`; -1 if none is left.
 *
 * A thread takes its own share in order, so that it reads memory that lies side by side, and then
 * from the ends of what others have left: weights were read at 40 GB/s when two threads took turns,
 * and at 50 in shares. */
static inline int64_t take_task(struct worker *worker, int64_t num_tasks)
{
    for (int64_t i = 0; i < worker->num_threads; i++) {
        int64_t index = (worker->index + i) % worker->num_threads;
        int64_t begin = begin_of_share(worker, index, num_tasks);
        int64_t end = begin_of_share(worker, index + 1, num_tasks);
        _Atomic uint64_t *taken = &worker->shares[index].taken;
        uint64_t seen = atomic_load_explicit(taken, memory_order_relaxed);
        for (;;) {
            int64_t front = (int64_t)(uint32_t)seen, back = (int64_t)(seen >> 32);
            if (front + back == end - begin)
                break;
            uint64_t one = i == 0 ? 1 : (uint64_t)1 << 32;
            if (atomic_compare_exchange_weak_explicit(taken, &seen, seen + one,
                                                      memory_order_relaxed, memory_order_relaxed))
                return i == 0 ? begin + front : end - 1 - back;
        }
    }
    return -1;
}

#endif
