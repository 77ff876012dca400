/* Threads that wait for each other are to run on cores of their own.
 *
 * A kernel wakes a thread where its core seems free and leaves it there: of two that ended up on
 * one core, the one that waits holds the other up, while a core that runs nothing but idle work
 * (SCHED_IDLE) stays out of both's sight for seconds. So who is going to wait looks where the
 * others were last, and leaves a core that one of them needs. A mask that held threads to cores for
 * good would also hold them to those that other processes take.
 *
 * A mask that somebody changes at the moment of a move is lost, and a thread that has moved keeps
 * to the cores that it had when its cgroup is given more.
 */
#ifndef TOPWORK_RUNTIME_CORES_H
#define TOPWORK_RUNTIME_CORES_H

#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

/* Nanoseconds before a thread moves again: where there are too few cores for all, it would go on
 * from one to the next, each time away from what its caches hold. */
enum { SETTLED_NS = 2 * 1000 * 1000 };

static inline int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* Move this thread to another of the cores that it may use, if there are as many as need one;
 * `left_at` is when it did so last. Return whether it has moved. */
static inline bool leave_core(int64_t num_needed, int64_t *left_at)
{
    cpu_set_t allowed, others;
    int core = sched_getcpu();
    int64_t now = now_ns();
    if (core < 0 || (*left_at != 0 && now - *left_at < SETTLED_NS))
        return false;
    *left_at = now;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        return false; /* more cores than a set has */
    if (CPU_COUNT(&allowed) < 2 || CPU_COUNT(&allowed) < num_needed)
        return false;
    others = allowed;
    CPU_CLR((size_t)core, &others);
    if (sched_setaffinity(0, sizeof others, &others) != 0)
        return false;
    sched_setaffinity(0, sizeof allowed, &allowed);
    return true;
}

#endif
