/* Rows times one panel of bfloat16 in tiles.
 *
 * A panel's steps are the rows of a tile as they lie. The order in which an output is summed
 * then: its bias, then TILE_INPUTS after the other; the rest of the inputs is one more tile, with
 * zeros. Every row does the same operations whatever stands beside it, and the panel's form changes
 * none of them.
 */
#ifndef TOPWORK_LINEAR_PANEL_AMX_H
#define TOPWORK_LINEAR_PANEL_AMX_H

#include "linear/panel.h"
#include "simd/amx.h"

enum {
    PASS_ROWS = 2 * TILE_ROWS, /* whose sums stay in tiles, with all outputs of a panel */
    STEP_BYTES = PANEL * 4,
    PART_BYTES = TILE_STEPS * STEP_BYTES, /* of a panel: two tiles */
    AHEAD_PARTS = 2,                      /* of a plain panel that are fetched before their use */
};

/* A thread's own memory, and what it has told its tiles. */
struct tiling {
    char *rest;  /* [PASS_ROWS, TILE_LINE]: the last inputs of some rows */
    float *y;    /* [PASS_ROWS, PANEL]: outputs of a panel that is cut */
    char *parts; /* [parts, PART_BYTES] */
    struct tile_rows rows;
};

INLINE int64_t num_parts(int64_t num_steps) { return round_up(num_steps, TILE_STEPS) / TILE_STEPS; }

INLINE int64_t tiling_bytes(int64_t num_steps)
{
    return PASS_ROWS * (TILE_LINE + STEP_BYTES) + (num_parts(num_steps) + 2) * PART_BYTES;
}

INLINE struct tiling make_tiling(char *scratch)
{
    return (struct tiling){
        .rest = scratch,
        .y = (float *)(scratch + PASS_ROWS * TILE_LINE),
        .parts = scratch + PASS_ROWS * (TILE_LINE + STEP_BYTES),
    };
}

#if HAS_TILES

INLINE void add_part(bool has_second, const char *x, int64_t row_size, const char *part)
{
    _tile_loadd(6, part, STEP_BYTES);
    _tile_loadd(7, part + TILE_LINE, STEP_BYTES);
    _tile_loadd(4, x, row_size);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (has_second) {
        _tile_loadd(5, x + TILE_ROWS * row_size, row_size);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

/* A panel that is brought into plain form, part after part. */
struct unpacking {
    const struct job *job;
    const struct outlier *next_outlier;
};

/* Write the words of one part, with zeros behind the last step, or say where they lie. */
INLINE const char *unpack_part(struct unpacking *u, int64_t part, char *to)
{
    const struct job *job = u->job;
    int64_t first = part * TILE_STEPS, num_steps = smaller(TILE_STEPS, job->num_steps - first);
    if (job->coded == NULL) {
        const char *from = job->weights + part * PART_BYTES;
        for (int i = 0; i < PART_BYTES; i += 64)
            prefetch(from, AHEAD_PARTS * PART_BYTES + i);
        if (num_steps == TILE_STEPS)
            return from;
        memcpy(to, from, (size_t)(num_steps * STEP_BYTES));
    } else {
        const struct coded_panel *p = job->coded;
        const struct outlier *end = p->outliers + p->num_outliers;
        __m512i table = load_table(p->table);
        u32v words[4];
        for (int64_t step = 0; step < num_steps; step += GROUP_STEPS) {
            int64_t group = (first + step) / GROUP_STEPS;
            const uint8_t *from = p->groups + group * GROUP_BYTES;
            for (int i = 0; i < GROUP_BYTES; i += 64)
                prefetch(from, AHEAD_GROUPS * GROUP_BYTES + i);
            load_group(from, table, words);
            if (u->next_outlier < end && u->next_outlier->place / GROUP_WORDS == group)
                u->next_outlier = patch_group(u->next_outlier, end, group, words);
            memcpy(to + step * STEP_BYTES, words, sizeof words);
        }
    }
    if (num_steps < TILE_STEPS)
        memset(to + num_steps * STEP_BYTES, 0, (size_t)((TILE_STEPS - num_steps) * STEP_BYTES));
    return to;
}

/* Return a part in plain form, which is kept until the last pass. */
INLINE const char *part_of_panel(struct unpacking *u, int64_t part, bool is_first, bool is_last,
                                 const struct tiling *tiling)
{
    char *place = tiling->parts + (is_first && is_last ? part % 3 : part) * PART_BYTES;
    bool is_plain = u->job->coded == NULL && (part + 1) * TILE_STEPS <= u->job->num_steps;
    if (is_first)
        return unpack_part(u, part, place);
    return is_plain ? u->job->weights + part * PART_BYTES : place;
}

INLINE struct fetching fetching_of(const struct job *job, int64_t num_passes)
{
    int64_t num_groups = (job->num_steps + GROUP_STEPS - 1) / GROUP_STEPS;
    int64_t size = job->coded == NULL ? job->num_steps * STEP_BYTES : num_groups * GROUP_BYTES;
    const char *first = job->coded == NULL ? job->weights : (const char *)job->coded->groups;
    return fetching_behind(first, size, num_passes * num_parts(job->num_steps));
}

/* Return the inputs of rows that belong to a part. */
INLINE const char *inputs_of(const struct job *job, const struct tiling *tiling, int64_t part,
                             int64_t *row_size)
{
    *row_size = job->row_size;
    if ((part + 1) * TILE_LINE <= job->num_inputs * 2)
        return job->x + part * TILE_LINE;
    int64_t num_bytes = job->num_inputs * 2 - part * TILE_LINE;
    for (int64_t row = 0; row < job->num_rows; row++) {
        char *to = tiling->rest + row * TILE_LINE;
        memset(to, 0, TILE_LINE);
        memcpy(to, job->x + row * job->row_size + part * TILE_LINE, (size_t)num_bytes);
    }
    *row_size = TILE_LINE;
    return tiling->rest;
}

INLINE void store_sums(bool has_second, const struct job *job, const struct tiling *tiling)
{
    bool is_cut = job->num_outputs < PANEL;
    float *y = is_cut ? tiling->y : job->y;
    int64_t stride = is_cut ? PANEL : job->y_stride;
    store_tiles(has_second, y, stride * 4);
    for (int64_t row = 0; is_cut && row < job->num_rows; row++)
        memcpy(job->y + row * job->y_stride, y + row * PANEL, (size_t)job->num_outputs * 4);
}

/* Multiply up to PASS_ROWS rows by a panel. Its parts are in plain form already, or else are
 * brought there, one ahead of the product, for passes to come if there are any. */
INLINE void multiply_pass(bool has_second, bool is_first, bool is_last, const struct job *job,
                          const struct tiling *tiling, struct fetching *fetching)
{
    int64_t count = num_parts(job->num_steps), row_size;
    struct unpacking unpacking = {job, job->coded == NULL ? NULL : job->coded->outliers};
    const char *next = part_of_panel(&unpacking, 0, is_first, is_last, tiling);
    settle_memory();
    _tile_loadd(0, job->bias, 0);
    _tile_loadd(1, job->bias + TILE_ROWS, 0);
    if (has_second) {
        _tile_loadd(2, job->bias, 0);
        _tile_loadd(3, job->bias + TILE_ROWS, 0);
    }
    for (int64_t part = 0; part < count; part++) {
        const char *weights = next;
        if (part + 1 < count)
            next = part_of_panel(&unpacking, part + 1, is_first, is_last, tiling);
        if (!is_first)
            fetch_some(fetching);
        const char *x = inputs_of(job, tiling, part, &row_size);
        settle_memory();
        add_part(has_second, x, row_size, weights);
    }
    store_sums(has_second, job, tiling);
}

#define DEFINE_PASS(name, has_second)                                                              \
    static __attribute__((noinline)) void name(bool is_first, bool is_last, const struct job *job, \
                                               const struct tiling *tiling,                        \
                                               struct fetching *fetching)                          \
    {                                                                                              \
        if (is_first)                                                                              \
            multiply_pass(has_second, true, is_last, job, tiling, fetching);                       \
        else                                                                                       \
            multiply_pass(has_second, false, is_last, job, tiling, fetching);                      \
    }
DEFINE_PASS(pass_of_one_tile, false)
DEFINE_PASS(pass_of_two_tiles, true)

/* Do what a job tells, of any number of rows, in passes of a like size. */
static void multiply_in_tiles(struct job job, struct tiling *tiling)
{
    int64_t rows_left = job.num_rows, num_passes = round_up(rows_left, PASS_ROWS) / PASS_ROWS;
    struct fetching fetching = fetching_of(&job, num_passes - 1);
    for (bool is_first = true; num_passes > 0; num_passes--, is_first = false) {
        job.num_rows = (rows_left + num_passes - 1) / num_passes;
        int64_t first = smaller(job.num_rows, TILE_ROWS);
        shape_tiles(&tiling->rows, first, job.num_rows - first, TILE_LINE);
        (job.num_rows > TILE_ROWS ? pass_of_two_tiles : pass_of_one_tile)(is_first, num_passes == 1,
                                                                          &job, tiling, &fetching);
        job.x += job.num_rows * job.row_size;
        job.y += job.num_rows * job.y_stride;
        rows_left -= job.num_rows;
    }
}

#else

INLINE void multiply_in_tiles(struct job job, struct tiling *tiling)
{
    (void)job, (void)tiling;
    __builtin_unreachable(); /* there are none */
}

#endif
#endif
