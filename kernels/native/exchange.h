/* Sums and gathers between the ranks of one host, as other C functions call them.
 *
 * Every rank makes the same calls in the same order. A call that returns NOT_YET has kept its place
 * in `struct exchange`: the same call again goes on from there. After BROKEN there is no next call.
 */
#ifndef TOPWORK_EXCHANGE_H
#define TOPWORK_EXCHANGE_H

#include <stdint.h>

enum { DONE, NOT_YET, BROKEN };

/* One rank's own view, in its own memory; zeros but for the first line. */
struct exchange {
    char *region; /* [size] headers, then places [2, size, segment_bytes] */
    int64_t rank, size, segment_bytes, num_spins;
    uint64_t sequence;    /* of the last segment that this rank has published */
    uint64_t settled;     /* of the last segment that all ranks are known to have published */
    int64_t num_done;     /* elements or bytes of the call under way that are finished */
    int64_t is_published; /* the segment under way is */
    uint64_t missing;     /* after NOT_YET: a bit for each rank that is waited for */
};

/* Write the float32 sum, in pairs of ranks, of all ranks' `x` of equal `count`; out may be x. */
int topwork_all_reduce(struct exchange *e, const void *x, float *out, int64_t count,
                       int64_t is_bf16);

/* Write all ranks' x [num_rows, row_bytes[rank]] side by side to rank 0's out; others have none. */
int topwork_gather_first(struct exchange *e, const void *x, char *out, int64_t num_rows,
                         const int64_t *row_bytes);

#endif
