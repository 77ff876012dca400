/* Threads that run a program's ops together.
 *
 * Owns the threads and their meetings. Between two programs they sleep; within one they meet after
 * every op, a hundred and more times in a few milliseconds, so there they spin for a while before
 * they yield. Knows nothing of what an op does.
 */
#define _POSIX_C_SOURCE 199309L /* clock_gettime */

#include "crew.h"

#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

enum {
    SPINS = 4000,  /* pauses before a thread that waits for the others yields its core */
    YIELDS = 1000, /* then, before one that was roused for nothing sleeps again */
};

struct crew {
    int64_t num_threads; /* the caller of `topwork_run` is one of them */
    pthread_t *threads;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    _Atomic int64_t num_programs; /* begun so far; written under the mutex */
    int64_t num_calls;            /* to rouse the threads; under the mutex, as is the next */
    int is_closing;

    const struct step *steps; /* [2], by an entry's kind */
    const struct entry *entries;
    int64_t *nanoseconds; /* [num_entries]: of each op are added here, if it is not null */
    int64_t first_entry, num_entries, scratch_bytes;
    int64_t num_runs;       /* begun so far; read before a thread's first meeting in a run */
    _Atomic int64_t halted; /* the last halt: HALTED_AT */
    struct share *shares;   /* [2, num_threads]: of ops in turns */
    char *scratch;          /* [num_threads, scratch_bytes] */
    _Atomic int64_t num_arrived, num_meetings;
};

/* Which entry of which run ended it. A later halt is a larger number: a thread that was held up
 * after the meeting at which its run ended may look only when others have come that far. */
#define HALTED_AT(run, entry) ((run) << 32 | (entry))

struct member {
    struct crew *crew;
    int64_t index;
};

static inline void pause_core(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Return when all threads have come; what any of them wrote before is seen by all. */
static void meet(struct crew *crew)
{
    int64_t meeting = atomic_load_explicit(&crew->num_meetings, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&crew->num_arrived, 1, memory_order_acq_rel) + 1
        == crew->num_threads) {
        atomic_store_explicit(&crew->num_arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&crew->num_meetings, meeting + 1, memory_order_release);
        return;
    }
    for (int64_t i = 0; atomic_load_explicit(&crew->num_meetings, memory_order_acquire) == meeting;
         i++)
        if (i < SPINS)
            pause_core();
        else
            sched_yield();
}

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000 + time.tv_nsec;
}

static struct share *shares_of(struct crew *crew, int64_t entry)
{
    return crew->shares + entry % 2 * crew->num_threads;
}

/* Return the entry after the last that was run. The caller's next program may begin as soon as all
 * have met after that. */
static int64_t run_program(struct crew *crew, int64_t index, int64_t num_threads)
{
    const struct entry *entries = crew->entries;
    int64_t num_entries = crew->num_entries;
    struct worker worker = {
        .index = index,
        .num_threads = num_threads,
        .scratch = crew->scratch + index * crew->scratch_bytes,
    };
    int64_t *nanoseconds = index == 0 ? crew->nanoseconds : NULL;
    int64_t run = crew->num_runs;
    for (int64_t i = crew->first_entry; i < num_entries; i++) {
        int64_t begin = nanoseconds != NULL ? now() : 0;
        worker.step = crew->steps + entries[i].kind;
        worker.shares = shares_of(crew, i);
        entries[i].run(entries[i].op, &worker);
        /* Nobody takes of the next before all have met, nor of the one before since they did. */
        atomic_store_explicit(&shares_of(crew, i + 1)[index].taken, 0, memory_order_relaxed);
        if (worker.is_halted)
            atomic_store_explicit(&crew->halted, HALTED_AT(run, i), memory_order_relaxed);
        if (num_threads > 1)
            meet(crew);
        if (nanoseconds != NULL)
            nanoseconds[i] += now() - begin;
        int64_t halted = atomic_load_explicit(&crew->halted, memory_order_relaxed);
        if (halted == HALTED_AT(run, i) || halted >= HALTED_AT(run + 1, 0))
            return i + 1;
    }
    return num_entries;
}

/* Wait for a program without sleeping; return whether one has begun. */
static int await_program(struct crew *crew, int64_t num_seen)
{
    for (int64_t i = 0; i < SPINS + YIELDS; i++) {
        if (atomic_load_explicit(&crew->num_programs, memory_order_acquire) != num_seen)
            return 1;
        if (i < SPINS)
            pause_core();
        else
            sched_yield();
    }
    return 0;
}

static void *live(void *argument)
{
    struct member member = *(struct member *)argument;
    struct crew *crew = member.crew;
    free(argument);
    int64_t num_seen = 0, num_heard = 0;
    for (;;) {
        pthread_mutex_lock(&crew->mutex);
        while (crew->num_programs == num_seen && crew->num_calls == num_heard && !crew->is_closing)
            pthread_cond_wait(&crew->changed, &crew->mutex);
        int is_closing = crew->is_closing;
        num_heard = crew->num_calls;
        pthread_mutex_unlock(&crew->mutex);
        if (is_closing)
            return NULL;
        if (!await_program(crew, num_seen))
            continue;
        num_seen++; /* the next cannot begin before this thread has met the others in this one */
        run_program(crew, member.index, crew->num_threads);
    }
}

/* End the threads and free the crew, whose programs must all have returned. */
void topwork_crew_free(struct crew *crew)
{
    pthread_mutex_lock(&crew->mutex);
    crew->is_closing = 1;
    pthread_cond_broadcast(&crew->changed);
    pthread_mutex_unlock(&crew->mutex);
    for (int64_t i = 1; i < crew->num_threads; i++)
        pthread_join(crew->threads[i], NULL);
    pthread_cond_destroy(&crew->changed);
    pthread_mutex_destroy(&crew->mutex);
    free(crew->threads);
    free(crew->shares);
    free(crew->scratch);
    free(crew);
}

/* Return a crew of so many threads, the caller of `topwork_run` among them; NULL if it fails. */
struct crew *topwork_crew_new(int64_t num_threads)
{
    struct crew *crew = calloc(1, sizeof *crew);
    if (crew == NULL)
        return NULL;
    crew->num_threads = 1;
    crew->threads = calloc((size_t)num_threads, sizeof *crew->threads);
    crew->shares = aligned_alloc(64, 2 * (size_t)num_threads * sizeof *crew->shares);
    pthread_mutex_init(&crew->mutex, NULL);
    pthread_cond_init(&crew->changed, NULL);
    bool has_memory = crew->threads != NULL && crew->shares != NULL;
    for (int64_t i = 1; has_memory && i < num_threads; i++) {
        struct member *member = malloc(sizeof *member);
        if (member == NULL)
            break;
        *member = (struct member){crew, i};
        if (pthread_create(&crew->threads[i], NULL, live, member) != 0) {
            free(member);
            break;
        }
        crew->num_threads++;
    }
    if (!has_memory || crew->num_threads < num_threads) {
        topwork_crew_free(crew);
        return NULL;
    }
    return crew;
}

/* Wake the threads for a program that is about to begin: that takes longer than many a task. */
void topwork_crew_rouse(struct crew *crew)
{
    if (crew->num_threads == 1)
        return;
    pthread_mutex_lock(&crew->mutex);
    crew->num_calls++;
    pthread_cond_broadcast(&crew->changed);
    pthread_mutex_unlock(&crew->mutex);
}

/* Run a program from entry `*next` on, on all threads or on the caller's alone, one caller at a
 * time, and leave in `*next` how far it came. Return 0, 1 if there was no memory, or 2 if the last
 * op that was run has halted the program. */
int topwork_run(struct crew *crew, const struct step steps[2], const struct entry *entries,
                int64_t num_entries, int64_t scratch_bytes, int64_t is_alone, int64_t *nanoseconds,
                int64_t *next)
{
    if (crew->scratch_bytes < scratch_bytes) {
        free(crew->scratch);
        crew->scratch_bytes = 0;
        scratch_bytes = (scratch_bytes + 4095) / 4096 * 4096;
        crew->scratch = aligned_alloc(4096, (size_t)(scratch_bytes * crew->num_threads));
        if (crew->scratch == NULL)
            return 1;
        crew->scratch_bytes = scratch_bytes;
    }
    for (int64_t i = 0; i < crew->num_threads; i++)
        atomic_init(&shares_of(crew, *next)[i].taken, 0);
    crew->nanoseconds = nanoseconds;
    crew->steps = steps;
    crew->entries = entries;
    crew->first_entry = *next;
    crew->num_runs++;
    crew->num_entries = num_entries;
    /* Without an op the threads would not meet, and might still be on their way in the next. */
    int64_t num_threads = is_alone || *next == num_entries ? 1 : crew->num_threads;
    if (num_threads > 1) {
        pthread_mutex_lock(&crew->mutex);
        crew->num_programs++;
        pthread_cond_broadcast(&crew->changed);
        pthread_mutex_unlock(&crew->mutex);
    }
    *next = run_program(crew, 0, num_threads);
    int64_t halted = atomic_load_explicit(&crew->halted, memory_order_relaxed);
    return halted == HALTED_AT(crew->num_runs, *next - 1) ? 2 : 0;
}
