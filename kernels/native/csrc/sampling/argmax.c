/* The largest of every row of logits, and where it first stands. */
#include <math.h>

#include "runtime/thread_pool.h"
#include "simd/vector.h"

struct argmax {
    const float *x; /* [T, N] */
    float *values;  /* [T] */
    int64_t *ids;   /* [T] */
    int64_t stride; /* numbers from one row to the next */
    int64_t width;  /* N, below 2^31 */
};

int64_t topwork_argmax_scratch(const void *op)
{
    (void)op;
    return 0;
}

/* A NaN is larger than all: return its place, or -1 if there is none. */
static int64_t find_nan(const float *x, int64_t width)
{
    for (int64_t i = 0; i < width; i++)
        if (isnan(x[i]))
            return i;
    return -1;
}

static int64_t find_largest(const float *x, int64_t width)
{
    f32v top = splat(-INFINITY);
    i32v place = {0}, is_nan = {0}, at = lane_numbers();
    int64_t i = 0, largest = 0;
    for (; i + LANES <= width; i += LANES, at += LANES) {
        f32v part = load_f32(x + i);
        i32v is_larger = part > top;
        top = select_lanes(is_larger, part, top);
        place = (is_larger & at) | (~is_larger & place);
        is_nan |= part != part;
    }
    float value = -INFINITY;
    bool has_nan = false;
    for (int lane = 0; lane < LANES; lane++) {
        has_nan |= is_nan[lane] != 0;
        if (top[lane] > value || (top[lane] == value && place[lane] < largest)) {
            value = top[lane];
            largest = place[lane];
        }
    }
    for (; i < width; i++) {
        has_nan |= isnan(x[i]);
        if (x[i] > value) {
            value = x[i];
            largest = i;
        }
    }
    return has_nan ? find_nan(x, width) : largest;
}

void topwork_argmax(const void *op, struct worker *worker)
{
    const struct argmax *p = op;
    for (int64_t row; (row = take_task(worker, worker->step->num_rows)) >= 0;) {
        const float *x = p->x + row * p->stride;
        p->ids[row] = find_largest(x, p->width);
        p->values[row] = x[p->ids[row]];
    }
}
