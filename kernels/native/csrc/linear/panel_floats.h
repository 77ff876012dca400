/* Rows and panels of bfloat16 as floats, for a CPU that has no dot products of bfloat16.
 *
 * Of a pair the second float comes first: a product of floats over twice as many steps then does
 * what one of pairs does, in the same order. A thread keeps so rows for all panels, and part of a
 * panel for all tiles of rows.
 */
#ifndef TOPWORK_LINEAR_PANEL_FLOATS_H
#define TOPWORK_LINEAR_PANEL_FLOATS_H

#include "linear/panel.h"

enum { WIDE_STEPS = 32 }; /* of a panel, 8 KiB, which stay in a core's first cache */

/* A thread's own memory. */
struct widening {
    char *rows;        /* [rows of a block, 2 steps] float */
    char *part;        /* [2 WIDE_STEPS, PANEL] float, of a panel */
    float *sums;       /* [rows of a block, PANEL]: where y lies rows may push each other out */
    int64_t first_row; /* that is there; -1: none */
};

INLINE int64_t widened_row_bytes(int64_t num_steps) { return num_steps * 8; }

INLINE int64_t widening_bytes(int64_t num_rows, int64_t num_steps)
{
    int64_t rows = round_up(num_rows * widened_row_bytes(num_steps), 64);
    return rows + WIDE_STEPS * PANEL * 8 + num_rows * PANEL * (int64_t)sizeof(float);
}

INLINE struct widening make_widening(char *scratch, int64_t num_rows, int64_t num_steps)
{
    char *part = scratch + round_up(num_rows * widened_row_bytes(num_steps), 64);
    return (struct widening){scratch, part, (float *)(part + WIDE_STEPS * PANEL * 8), -1};
}

#if LANES == 16
#define JOIN_LOW(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define JOIN_HIGH(a, b) SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#else
#define JOIN_LOW(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define JOIN_HIGH(a, b) SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#endif

/* Write one row's pairs; the last input has a zero for its partner if their number is odd. */
INLINE void widen_row(const char *from, int64_t num_inputs, float *to)
{
    int64_t k = 0;
    for (; k + 2 * LANES <= num_inputs; k += 2 * LANES) {
        u32v pairs = load_words(from + k * 2);
        f32v second = second_floats(pairs), first = first_floats(pairs);
        store_f32(to + k, JOIN_LOW(second, first));
        store_f32(to + k + LANES, JOIN_HIGH(second, first));
    }
    for (; k < num_inputs; k += 2) {
        uint16_t pair[2] = {0};
        memcpy(pair, from + k * 2, (size_t)smaller(num_inputs - k, 2) * 2);
        uint32_t floats[2] = {(uint32_t)pair[1] << 16, (uint32_t)pair[0] << 16};
        memcpy(to + k, floats, sizeof floats);
    }
}

/* Write the floats of a step's words. */
INLINE void widen_step(const u32v words[PANEL_VECTORS], float *to)
{
#pragma GCC unroll 4
    for (int i = 0; i < PANEL_VECTORS; i++) {
        store_f32(to + i * LANES, second_floats(words[i]));
        store_f32(to + PANEL + i * LANES, first_floats(words[i]));
    }
}

static void widen_plain(const char *weights, int64_t num_steps, float *to)
{
    for (int64_t k = 0; k < num_steps; k++, weights += PANEL * 4, to += 2 * PANEL) {
        u32v words[PANEL_VECTORS];
#pragma GCC unroll 4
        for (int i = 0; i < PANEL_VECTORS; i++)
            words[i] = load_words(weights + i * LANES * 4);
        widen_step(words, to);
    }
}

/* Widen a coded panel from a group on; return the first outlier word behind. */
static const struct outlier *widen_coded(const struct coded_panel *p, const struct outlier *outlier,
                                         int64_t group, int64_t num_steps, float *to)
{
    const struct outlier *end = p->outliers + p->num_outliers;
    code_table table = load_table(p->table);
    u32v words[GROUP_VECTORS];
    for (int64_t step = 0; step < num_steps; step += GROUP_STEPS, group++, to += 4 * PANEL) {
        load_group(p->groups + group * GROUP_BYTES, table, words);
        if (outlier < end && outlier->place / GROUP_WORDS == group)
            outlier = patch_group(outlier, end, group, words);
        widen_step(words, to);
        if (step + 1 < num_steps)
            widen_step(words + PANEL_VECTORS, to + 2 * PANEL);
    }
    return outlier;
}

/* Make rows of a job those of pairs' floats; they are kept while the first of them is the same. */
static void widen_rows(struct job *job, int64_t first_row, struct widening *widening)
{
    int64_t size = widened_row_bytes(job->num_steps);
    for (int64_t row = 0; widening->first_row != first_row && row < job->num_rows; row++)
        widen_row(job->x + row * job->row_size, job->num_inputs,
                  (float *)(widening->rows + row * size));
    widening->first_row = first_row;
    job->x = widening->rows;
    job->row_size = size;
}

/* A panel that is widened part after part. */
struct parts {
    struct job job;
    const struct outlier *next_outlier;
    int64_t step; /* the next part's first */
};

INLINE struct parts parts_of(const struct job *job)
{
    return (struct parts){*job, job->coded == NULL ? NULL : job->coded->outliers, 0};
}

/* Give the job of a panel's next part, of floats, which fetches the one behind; or say that there
 * is none left. */
static bool next_part(struct parts *parts, const struct widening *widening, struct job *part)
{
    const struct job *job = &parts->job;
    int64_t step = parts->step, count = smaller(WIDE_STEPS, job->num_steps - step);
    float *to = (float *)widening->part;
    if (count <= 0)
        return false;
    *part = *job;
    if (job->coded == NULL) {
        const char *weights = job->weights + step * PANEL * 4;
        widen_plain(weights, count, to);
        part->ahead = (uintptr_t)weights + WIDE_STEPS * PANEL * 4;
        part->ahead_size = PANEL * 2;
    } else {
        int64_t group = step / GROUP_STEPS;
        parts->next_outlier = widen_coded(job->coded, parts->next_outlier, group, count, to);
        part->ahead = (uintptr_t)(job->coded->groups + group * GROUP_BYTES)
                      + WIDE_STEPS / GROUP_STEPS * GROUP_BYTES;
        part->ahead_size = GROUP_BYTES / GROUP_STEPS / 2;
    }
    part->coded = NULL;
    part->weights = widening->part;
    part->num_steps = 2 * count;
    part->x = job->x + step * 8;
    part->sums = widening->sums;
    if (step > 0)
        part->bias = NULL;
    if (step + count < job->num_steps) {
        part->y = widening->sums;
        part->y_stride = part->num_outputs = PANEL;
    }
    parts->step = step + count;
    return true;
}

#endif
