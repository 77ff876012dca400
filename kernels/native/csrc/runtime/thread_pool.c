/* Threads that run a program's ops together.
 *
 * Between two programs they sleep; within one they pass a barrier after every op, a hundred and
 * more times in a few milliseconds, so there they spin for a while before they yield.
 */
#include "runtime/thread_pool.h"

#include <pthread.h>
#include <stdlib.h>

#include "runtime/cores.h"

enum {
    BRIEF = 64,    /* pauses before a thread that waits looks where the others are */
    SPINS = 4000,  /* pauses before a thread that waits for the others yields its core */
    YIELDS = 1000, /* then, before one that was woken for nothing sleeps again */
    /* Of shares: threads may be in two ops at once, and the shares of the next two are ready. */
    NUM_SETS = 4,
};

/* Where a thread was at its last barrier, and when it last left a core that another was on. */
struct seat {
    _Alignas(64) _Atomic int64_t core;
    int64_t left_at;
};

struct thread_pool {
    int64_t num_threads; /* the caller of `topwork_run` is one of them */
    pthread_t *threads;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    _Atomic int64_t num_programs; /* begun so far; written under the mutex */
    int64_t num_wakes;            /* to wake the threads; under the mutex, as is the next */
    int is_closing;

    const struct step *steps; /* [3], by an entry's kind */
    const struct entry *entries;
    int64_t *nanoseconds; /* [num_entries]: of each op are added here, if it is not null */
    int64_t first_entry, num_entries, scratch_bytes;
    int64_t num_runs;       /* begun so far; read before a thread's first barrier in a run */
    _Atomic int64_t halted; /* the last halt: HALTED_AT */
    struct share *shares;   /* [NUM_SETS, num_threads]: of ops in turns */
    struct seat *seats;     /* [num_threads] */
    char *scratch;          /* [num_threads, scratch_bytes] */
    _Atomic int64_t num_arrived, num_barriers; /* threads at the barrier; barriers passed */
};

/* Which entry of which run ended it. A later halt is a larger number: a thread that was held up
 * after the barrier at which its run ended may look only when others have come that far. */
#define HALTED_AT(run, entry) ((run) << 32 | (entry))

struct thread {
    struct thread_pool *pool;
    int64_t index;
};

static inline void pause_core(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void take_seat(struct seat *seat)
{
    atomic_store_explicit(&seat->core, sched_getcpu(), memory_order_relaxed);
}

/* Leave this core if another thread was last seen on it. */
static void make_room(struct thread_pool *pool, int64_t index)
{
    struct seat *own = pool->seats + index;
    int64_t core = sched_getcpu();
    for (int64_t i = 0; i < pool->num_threads; i++)
        if (i != index
            && atomic_load_explicit(&pool->seats[i].core, memory_order_relaxed) == core) {
            if (leave_core(pool->num_threads, &own->left_at))
                take_seat(own);
            return;
        }
}

/* Return when all threads have come; what any of them wrote before is seen by all. */
static void barrier(struct thread_pool *pool, int64_t index)
{
    int64_t passed = atomic_load_explicit(&pool->num_barriers, memory_order_relaxed);
    take_seat(pool->seats + index);
    if (atomic_fetch_add_explicit(&pool->num_arrived, 1, memory_order_acq_rel) + 1
        == pool->num_threads) {
        atomic_store_explicit(&pool->num_arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&pool->num_barriers, passed + 1, memory_order_release);
        return;
    }
    for (int64_t i = 0; atomic_load_explicit(&pool->num_barriers, memory_order_acquire) == passed;
         i++) {
        if (i == BRIEF)
            make_room(pool, index);
        if (i < SPINS)
            pause_core();
        else
            sched_yield();
    }
}

void topwork_meet(const struct worker *worker)
{
    if (worker->num_threads > 1)
        barrier(worker->pool, worker->index);
}

static struct share *shares_of(struct thread_pool *pool, int64_t entry)
{
    return pool->shares + entry % NUM_SETS * pool->num_threads;
}

/* Wait for the others after an op. Before that nobody takes of the next two, and nobody of an op
 * with their sets. */
static void end_op(struct thread_pool *pool, int64_t index, int64_t entry, int64_t num_threads)
{
    for (int64_t next = entry + 1; next <= entry + 2; next++)
        atomic_store_explicit(&shares_of(pool, next)[index].taken, 0, memory_order_relaxed);
    if (num_threads > 1)
        barrier(pool, index);
}

/* Return the entry after the last that was run. The caller's next program may begin as soon as all
 * have passed the barrier after that. */
static int64_t run_program(struct thread_pool *pool, int64_t index, int64_t num_threads)
{
    const struct entry *entries = pool->entries;
    int64_t num_entries = pool->num_entries;
    struct worker worker = {
        .index = index,
        .num_threads = num_threads,
        .pool = pool,
        .scratch = pool->scratch == NULL ? NULL : pool->scratch + index * pool->scratch_bytes,
    };
    int64_t *nanoseconds = index == 0 ? pool->nanoseconds : NULL;
    int64_t run = pool->num_runs;
    for (int64_t i = pool->first_entry; i < num_entries; i++) {
        int64_t begin = nanoseconds != NULL ? now_ns() : 0;
        struct step step = pool->steps[entries[i].kind];
        step.num_rows *= entries[i].rows_each;
        worker.step = &step;
        worker.shares = shares_of(pool, i);
        entries[i].run(entries[i].op, &worker);
        if (worker.is_halted)
            atomic_store_explicit(&pool->halted, HALTED_AT(run, i), memory_order_relaxed);
        if (!entries[i].is_joined)
            end_op(pool, index, i, num_threads);
        if (nanoseconds != NULL)
            nanoseconds[i] += now_ns() - begin;
        int64_t halted = atomic_load_explicit(&pool->halted, memory_order_relaxed);
        if (halted == HALTED_AT(run, i) || halted >= HALTED_AT(run + 1, 0))
            return i + 1;
    }
    return num_entries;
}

/* Wait for a program without sleeping; return whether one has begun. */
static int await_program(struct thread_pool *pool, int64_t index, int64_t num_seen)
{
    for (int64_t i = 0; i < SPINS + YIELDS; i++) {
        if (i == BRIEF)
            make_room(pool, index); /* the caller's, perhaps */
        if (atomic_load_explicit(&pool->num_programs, memory_order_acquire) != num_seen)
            return 1;
        if (i < SPINS)
            pause_core();
        else
            sched_yield();
    }
    return 0;
}

static void *run_thread(void *argument)
{
    struct thread thread = *(struct thread *)argument;
    struct thread_pool *pool = thread.pool;
    free(argument);
    int64_t num_seen = 0, num_heard = 0;
    for (;;) {
        pthread_mutex_lock(&pool->mutex);
        while (pool->num_programs == num_seen && pool->num_wakes == num_heard && !pool->is_closing)
            pthread_cond_wait(&pool->changed, &pool->mutex);
        int is_closing = pool->is_closing;
        num_heard = pool->num_wakes;
        pthread_mutex_unlock(&pool->mutex);
        if (is_closing)
            return NULL;
        if (!await_program(pool, thread.index, num_seen))
            continue;
        num_seen++; /* the next cannot begin before this thread has passed this one's barriers */
        run_program(pool, thread.index, pool->num_threads);
    }
}

/* End the threads and free the pool, whose programs must all have returned. */
void topwork_thread_pool_free(struct thread_pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    pool->is_closing = 1;
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->mutex);
    for (int64_t i = 1; i < pool->num_threads; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->changed);
    pthread_mutex_destroy(&pool->mutex);
    free(pool->threads);
    free(pool->shares);
    free(pool->seats);
    free(pool->scratch);
    free(pool);
}

/* Return a pool of so many threads, the caller of `topwork_run` among them; NULL if it fails. */
struct thread_pool *topwork_thread_pool_new(int64_t num_threads)
{
    struct thread_pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL)
        return NULL;
    pool->num_threads = 1;
    pool->threads = calloc((size_t)num_threads, sizeof *pool->threads);
    pool->shares = aligned_alloc(64, NUM_SETS * (size_t)num_threads * sizeof *pool->shares);
    pool->seats = aligned_alloc(64, (size_t)num_threads * sizeof *pool->seats);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->changed, NULL);
    bool has_memory = pool->threads != NULL && pool->shares != NULL && pool->seats != NULL;
    for (int64_t i = 0; has_memory && i < num_threads; i++)
        pool->seats[i] = (struct seat){.core = -1};
    for (int64_t i = 1; has_memory && i < num_threads; i++) {
        struct thread *thread = malloc(sizeof *thread);
        if (thread == NULL)
            break;
        *thread = (struct thread){pool, i};
        if (pthread_create(&pool->threads[i], NULL, run_thread, thread) != 0) {
            free(thread);
            break;
        }
        pool->num_threads++;
    }
    if (!has_memory || pool->num_threads < num_threads) {
        topwork_thread_pool_free(pool);
        return NULL;
    }
    return pool;
}

/* Wake the threads for a program that is about to begin: that takes longer than many a task. */
void topwork_thread_pool_wake(struct thread_pool *pool)
{
    if (pool->num_threads == 1)
        return;
    pthread_mutex_lock(&pool->mutex);
    pool->num_wakes++;
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->mutex);
}

/* Run a program from entry `*next` on, on all threads or on the caller's alone, one caller at a
 * time, and leave in `*next` how far it came. Return 0, 1 if there was no memory, or 2 if the last
 * op that was run has halted the program. */
int topwork_run(struct thread_pool *pool, const struct step steps[3], const struct entry *entries,
                int64_t num_entries, int64_t scratch_bytes, int64_t is_alone, int64_t *nanoseconds,
                int64_t *next)
{
    if (pool->scratch_bytes < scratch_bytes) {
        free(pool->scratch);
        pool->scratch_bytes = 0;
        scratch_bytes = (scratch_bytes + 4095) / 4096 * 4096;
        pool->scratch = aligned_alloc(4096, (size_t)(scratch_bytes * pool->num_threads));
        if (pool->scratch == NULL)
            return 1;
        pool->scratch_bytes = scratch_bytes;
    }
    for (int64_t entry = *next; entry <= *next + 1; entry++)
        for (int64_t i = 0; i < pool->num_threads; i++)
            atomic_init(&shares_of(pool, entry)[i].taken, 0);
    pool->nanoseconds = nanoseconds;
    pool->steps = steps;
    pool->entries = entries;
    pool->first_entry = *next;
    pool->num_runs++;
    pool->num_entries = num_entries;
    /* Without an op the threads would pass no barrier, and might still be on their way in the next.
     */
    int64_t num_threads = is_alone || *next == num_entries ? 1 : pool->num_threads;
    if (num_threads > 1) {
        pthread_mutex_lock(&pool->mutex);
        pool->num_programs++;
        pthread_cond_broadcast(&pool->changed);
        pthread_mutex_unlock(&pool->mutex);
    }
    *next = run_program(pool, 0, num_threads);
    int64_t halted = atomic_load_explicit(&pool->halted, memory_order_relaxed);
    return halted == HALTED_AT(pool->num_runs, *next - 1) ? 2 : 0;
}
