/* Sums and gathers between the ranks of one host, through a region of memory that they share.
 *
 * Every rank makes the same calls in the same order. A call that returns NOT_YET has kept its place
 * in `struct exchange`: the same call again goes on from there. After BROKEN there is no next call.
 *
 * The order of a sum is that of `sum_in_pairs` in worker/distributed/communicator.py. A rank writes
 * a segment to its place and publishes the segment's number; then it waits until all have published
 * theirs. There are two places for each rank, used in turn: who publishes a number has read all
 * segments before it, so the place of the last but one is free as soon as all have published the
 * last, and one wait for each segment is enough.
 *
 * What lies in the region is another process's word: it decides what a sum is and how long it
 * takes, never where this rank reads or writes.
 */
#include <stdatomic.h>

#include "runtime/cores.h"
#include "runtime/thread_pool.h"
#include "simd/vector.h"

enum { DONE, NOT_YET, BROKEN };

/* What a call adds up; a gather adds nothing. */
enum number { FLOAT32, BFLOAT16, INT32, GATHERED };

/* One rank's own view, in its own memory; zeros but for the first line. */
struct exchange {
    char *region; /* [size] headers, then places [2, size, segment_bytes] */
    int64_t rank, size, segment_bytes, num_spins;
    uint64_t sequence;    /* of the last segment that this rank has published */
    uint64_t settled;     /* of the last segment that all ranks are known to have published */
    int64_t num_done;     /* elements or bytes of the call under way that are finished */
    int64_t is_published; /* the segment under way is */
    uint64_t missing;     /* after NOT_YET: a bit for each rank that is waited for */
    int64_t left_at;      /* when this rank has last left a core for another, in nanoseconds */
};

enum {
    MAX_RANKS = 64, /* bits of `missing` */
    PATIENCE_NS = 1000 * 1000,
};

/* A rank's word to the others, on lines of its own (neighbours are fetched in pairs). */
struct header {
    _Alignas(128) _Atomic uint64_t published;
    _Atomic uint64_t calls[2]; /* what each place's segment belongs to */
    _Atomic int64_t core;      /* where the rank ran when it last published */
};
_Static_assert(sizeof(struct header) == 128,
               "worker/distributed/shared_memory.py sizes the region");

static struct header *header_of(const struct exchange *e, int64_t rank)
{
    return (struct header *)e->region + rank;
}

static char *place_of(const struct exchange *e, int64_t rank, uint64_t sequence)
{
    int64_t place = (int64_t)(sequence % 2) * e->size + rank;
    return e->region + e->size * (int64_t)sizeof(struct header) + place * e->segment_bytes;
}

/* Note which other ranks have not published segment `sequence`. */
static int look_for(struct exchange *e, uint64_t sequence)
{
    e->missing = 0;
    for (int64_t rank = 0; rank < e->size; rank++) {
        if (rank == e->rank)
            continue;
        const _Atomic uint64_t *published = &header_of(e, rank)->published;
        /* No rank can be two segments before or behind another. */
        uint64_t ahead = atomic_load_explicit(published, memory_order_acquire) - (sequence - 1);
        if (ahead > 2)
            return BROKEN;
        e->missing |= (uint64_t)(ahead == 0) << rank;
    }
    return e->missing ? NOT_YET : DONE;
}

/* Tell whether this core may be the one that a missing rank waits for. */
static bool is_in_the_way(const struct exchange *e)
{
    int64_t core = sched_getcpu();
    for (int64_t rank = 0; rank < e->size; rank++)
        if (e->missing >> rank & 1
            && atomic_load_explicit(&header_of(e, rank)->core, memory_order_relaxed) == core)
            return true;
    return false;
}

/* Leave this core; return whether there was another. */
static bool make_room(struct exchange *e)
{
    if (!leave_core(e->size, &e->left_at))
        return false;
    atomic_store_explicit(&header_of(e, e->rank)->core, sched_getcpu(), memory_order_relaxed);
    return true;
}

/* Wait for about a millisecond until all have published segment `sequence`. */
static int await_all(struct exchange *e, uint64_t sequence)
{
    int64_t deadline = 0, num_spins = e->num_spins;
    for (int64_t i = 0; e->settled != sequence; i++) {
        int state = look_for(e, sequence);
        if (state == BROKEN)
            return BROKEN;
        if (state == DONE) {
            e->settled = sequence;
            return DONE;
        }
        if (i == 0 && is_in_the_way(e) && !make_room(e))
            num_spins = 0;
        if (i < num_spins) {
            __builtin_ia32_pause();
        } else {
            int64_t now = now_ns();
            if (deadline == 0)
                deadline = now + PATIENCE_NS;
            else if (now > deadline)
                return NOT_YET;
            sched_yield();
        }
    }
    return DONE;
}

/* Put a segment into this rank's place and publish it, if that is still to be done. */
static int bring(struct exchange *e, const char *from, int64_t num_bytes, uint64_t call)
{
    if (e->is_published)
        return DONE;
    int state = await_all(e, e->sequence); /* a rank that was not waited for may still read */
    if (state != DONE)
        return state;
    uint64_t next = e->sequence + 1;
    struct header *own = header_of(e, e->rank);
    if (num_bytes > 0)
        memcpy(place_of(e, e->rank, next), from, (size_t)num_bytes);
    atomic_store_explicit(&own->calls[next % 2], call, memory_order_relaxed);
    atomic_store_explicit(&own->core, sched_getcpu(), memory_order_relaxed);
    atomic_store_explicit(&own->published, next, memory_order_release);
    e->sequence = next;
    e->is_published = 1;
    return DONE;
}

/* Wait for the other ranks' segments, which must be of the same call. */
static int await_segments(struct exchange *e, uint64_t call)
{
    int state = await_all(e, e->sequence);
    for (int64_t rank = 0; state == DONE && rank < e->size; rank++) {
        const _Atomic uint64_t *theirs = &header_of(e, rank)->calls[e->sequence % 2];
        if (rank != e->rank && atomic_load_explicit(theirs, memory_order_relaxed) != call)
            state = BROKEN;
    }
    return state;
}

/* Neighbours first, then pairs of them; the last of an odd number waits for its neighbour. */
INLINE f32v sum_of(int size, f32v *parts)
{
    for (int left = size; left > 1; left = (left + 1) / 2) {
        for (int i = 0; i < left / 2; i++)
            parts[i] = parts[2 * i] + parts[2 * i + 1];
        if (left % 2)
            parts[left / 2] = parts[left - 1];
    }
    return parts[0];
}

INLINE void add_up(int size, const char *const *ranks, float *out, int64_t count, bool is_bf16)
{
    f32v parts[MAX_RANKS];
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        for (int rank = 0; rank < size; rank++)
            parts[rank] = load_whole(ranks[rank] + i * (is_bf16 ? 2 : 4), is_bf16);
        store_f32(out + i, sum_of(size, parts));
    }
    if (i < count) {
        for (int rank = 0; rank < size; rank++)
            parts[rank] = load_some(ranks[rank], i, count - i, is_bf16);
        store_some(out, i, count - i, false, sum_of(size, parts));
    }
}

/* The sums of integers, which have no order. */
static void add_integers(int64_t size, const char *const *ranks, float *out, int64_t count)
{
    for (int64_t i = 0; i < count; i += LANES) {
        u32v sum = {0};
        for (int64_t rank = 0; rank < size; rank++)
            sum += (u32v)load_some(ranks[rank], i, count - i, false);
        store_some(out, i, count - i, false, (f32v)sum);
    }
}

INLINE void add_segments(const struct exchange *e, const char *own, float *out, int64_t count,
                         enum number number)
{
    const char *ranks[MAX_RANKS];
    bool is_bf16 = number == BFLOAT16;
    for (int64_t rank = 0; rank < e->size; rank++)
        ranks[rank] = rank == e->rank ? own : place_of(e, rank, e->sequence);
    if (number == INT32) {
        add_integers(e->size, ranks, out, count);
        return;
    }
    switch (e->size) {
    case 2: add_up(2, ranks, out, count, is_bf16); break;
    case 3: add_up(3, ranks, out, count, is_bf16); break;
    case 4: add_up(4, ranks, out, count, is_bf16); break;
    default: add_up((int)e->size, ranks, out, count, is_bf16); break;
    }
}

/* Write the float32 sum, in pairs of ranks, of all ranks' `x` of equal `count`, or of integers the
 * int32 sum; out may be x. */
int topwork_all_reduce(struct exchange *e, const void *x, float *out, int64_t count, int64_t number)
{
    int64_t element_size = number == BFLOAT16 ? 2 : 4, capacity = e->segment_bytes / element_size;
    uint64_t call = (uint64_t)count * 4 + (uint64_t)number;
    while (e->num_done < count) {
        int64_t num = smaller(capacity, count - e->num_done);
        const char *from = (const char *)x + e->num_done * element_size;
        int state = bring(e, from, num * element_size, call);
        if (state == DONE)
            state = await_segments(e, call);
        if (state != DONE)
            return state;
        switch (number) {
        case FLOAT32: add_segments(e, from, out + e->num_done, num, FLOAT32); break;
        case BFLOAT16: add_segments(e, from, out + e->num_done, num, BFLOAT16); break;
        case INT32: add_segments(e, from, out + e->num_done, num, INT32); break;
        }
        e->num_done += num;
        e->is_published = 0;
    }
    e->num_done = 0;
    return DONE;
}

/* Copy bytes `first` to `end` of a matrix whose rows have `row_bytes` to wider rows. */
static void place_columns(char *out, int64_t out_bytes, const char *from, int64_t first,
                          int64_t end, int64_t row_bytes)
{
    while (first < end) {
        int64_t row = first / row_bytes, column = first % row_bytes;
        int64_t num = smaller(row_bytes - column, end - first);
        memcpy(out + row * out_bytes + column, from, (size_t)num);
        from += num;
        first += num;
    }
}

/* Write all ranks' x [num_rows, row_bytes[rank]] side by side to rank 0's out; others have none. */
int topwork_gather_first(struct exchange *e, const void *x, char *out, int64_t num_rows,
                         const int64_t *row_bytes)
{
    int64_t out_bytes = 0, widest = 0;
    for (int64_t rank = 0; rank < e->size; rank++) {
        out_bytes += row_bytes[rank];
        widest = row_bytes[rank] > widest ? row_bytes[rank] : widest;
    }
    uint64_t call = (uint64_t)(num_rows * out_bytes) * 4 + GATHERED;
    /* All take part in as many segments as the widest rank needs; rank 0's are empty. */
    while (e->num_done < num_rows * widest) {
        int64_t first = e->num_done, next = first + e->segment_bytes;
        int64_t own_end = e->rank == 0 ? 0 : smaller(next, num_rows * row_bytes[e->rank]);
        int state = bring(e, (const char *)x + first, own_end - first, call);
        if (state == DONE && e->rank == 0)
            state = await_segments(e, call); /* the others go on: nothing comes back to them */
        if (state != DONE)
            return state;
        char *columns = out;
        for (int64_t rank = 0; e->rank == 0 && rank < e->size; rank++) {
            const char *from = rank == 0 ? (const char *)x + first : place_of(e, rank, e->sequence);
            int64_t end = smaller(next, num_rows * row_bytes[rank]);
            place_columns(columns, out_bytes, from, first, end, row_bytes[rank]);
            columns += row_bytes[rank];
        }
        e->num_done = next;
        e->is_published = 0;
    }
    e->num_done = 0;
    return DONE;
}

/* The sum over ranks as an op, so that a step of several ranks is one program: the caller's thread
 * exchanges. Where another rank is late by more than a call waits, or has gone, the program halts
 * and leaves the rest of the wait to the caller. */
struct rank_sum {
    struct exchange *exchange;
    float *x; /* [T, width]: this rank's part, replaced by the sum */
    int64_t width, number;
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
    if (worker->index == 0 && topwork_all_reduce(p->exchange, p->x, p->x, count, p->number) != DONE)
        worker->is_halted = 1;
}
