/* The sum over ranks as an op, so that a step of several ranks is one program.
 *
 * The caller's thread exchanges; where another rank is late by more than a call waits, or has gone,
 * the program halts and leaves the rest of the wait to the caller. Knows nothing of who is there.
 */
#include "crew.h"
#include "exchange.h"

struct rank_sum {
    struct exchange *exchange;
    float *x; /* [T, width]: this rank's part, replaced by the sum */
    int64_t width;
};

int64_t topwork_rank_sum_scratch(const void *op)
{
    (void)op;
    return 0;
}

void topwork_rank_sum(const void *op, struct worker *worker)
{
    const struct rank_sum *p = op;
    int64_t count = worker->step->num_rows * p->width;
    if (worker->index == 0 && topwork_all_reduce(p->exchange, p->x, p->x, count, 0) != DONE)
        worker->is_halted = 1;
}
