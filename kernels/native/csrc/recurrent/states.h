/* What ops on pages of states share: how threads take runs, and a state's beginning.
 *
 * A task is a run and a part of what it computes, a head or some channels, which no other part
 * needs. It goes through the run's rows in their order and keeps the state in its page, where no
 * other task has anything: so a state's bits are those of its sequence's rows, in any step.
 */
#ifndef TOPWORK_RECURRENT_STATES_H
#define TOPWORK_RECURRENT_STATES_H

#include <math.h>

#include "runtime/thread_pool.h"
#include "simd/vector.h"

enum {
    BLOCK_ROWS = 16,  /* rows whose factors are made at once; decides speed only */
    TILE_VECTORS = 4, /* columns of a state that go through the rows of a block together: they stay
                       * in the first cache, 16 KB with AVX2 where 128 features make a column */
};

/* Return the run of a task that this thread takes, and its part; null if none is left. */
INLINE const struct state_run *take_run(struct worker *worker, int64_t num_parts, int64_t *part)
{
    const struct step *step = worker->step;
    int64_t task = take_task(worker, step->num_state_runs * num_parts);
    if (task < 0)
        return NULL;
    *part = task % num_parts;
    return step->state_runs + task / num_parts;
}

/* Return where a run's state lies in a pool, so many elements behind its page's begin, with zeros
 * in all of its `size` elements if the run is its sequence's first. */
INLINE float *begin_state(float *states, int64_t page_stride, const struct state_run *run,
                          int64_t offset, int64_t size)
{
    float *state = states + run->page * page_stride + offset;
    if (run->is_new)
        memset(state, 0, (size_t)size * sizeof *state);
    return state;
}

/* Return log(1 + exp(x)). */
INLINE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

/* Call `body` for all columns of a state with a first column, a number of vectors and how many
 * columns they have: TILE_VECTORS whole ones, as long as there are, so that the compiler knows
 * both. A column's bits do not depend on which are beside it. */
#define FOR_TILES_OF_COLUMNS(num_columns, body)                    \
    do {                                                           \
        const int64_t tile_ = TILE_VECTORS * LANES;                \
        int64_t column_ = 0;                                       \
        for (; column_ + tile_ <= (num_columns); column_ += tile_) \
            body(column_, TILE_VECTORS, TILE_VECTORS * LANES);     \
        for (; column_ < (num_columns); column_ += LANES)          \
            body(column_, 1, (num_columns) - column_);             \
    } while (0)

#endif
