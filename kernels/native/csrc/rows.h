/* What the ops on whole rows share: how threads take rows, and sums over one.
 *
 * Sums over a row are 16, one for each element modulo 16, folded at the end.
 */
#ifndef TOPWORK_ROWS_H
#define TOPWORK_ROWS_H

#include <math.h>

#include "runtime/thread_pool.h"
#include "simd/vector.h"

enum {
    TASK_ELEMENTS = 8 * 1024, /* what a thread takes at once; decides speed only */
};

/* Rows that a thread takes at once, for rows of so many elements. */
INLINE int64_t task_rows(int64_t width)
{
    return width < TASK_ELEMENTS ? TASK_ELEMENTS / width : 1;
}

/* Call `body` for every row that this thread takes. */
#define FOR_ROWS_TAKEN(worker, row, width)                                       \
    for (int64_t rows_ = task_rows(width), num_rows_ = (worker)->step->num_rows, \
                 tasks_ = round_up(num_rows_, rows_) / rows_, task_;             \
         (task_ = take_task(worker, tasks_)) >= 0;)                              \
        for (int64_t row = task_ * rows_; row < smaller((task_ + 1) * rows_, num_rows_); row++)

INLINE float sum_of_squares(const float *x, int64_t width)
{
    f32v sums = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        f32v part = load_some(x, i, width - i, false);
        sums += part * part;
    }
    return sum_lanes(sums);
}

INLINE float root_mean_square(const float *x, int64_t width, double eps)
{
    return sqrtf(sum_of_squares(x, width) / (float)width + (float)eps);
}

/* out = x * scale * weight, rounded when it is stored; out may be x where it is float32. */
INLINE void store_scaled(const float *x, float scale, const void *weight, bool is_weight_bf16,
                         int64_t width, void *out, bool is_bf16)
{
    for (int64_t i = 0; i < width; i += LANES)
        store_some(out, i, width - i, is_bf16,
                   load_some(x, i, width - i, false) * scale
                       * load_some(weight, i, width - i, is_weight_bf16));
}

#endif
