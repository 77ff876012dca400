/* Rows times one panel of a weight: 32 outputs, in the order in which they are read.
 *
 * The order in which an output is summed: its bias, then one product after the other, from
 * the first input to the last; in bfloat16 two inputs at a time, the second of them first, by the
 * CPU's own instruction where it has one, else as floats. Every row does the same operations
 * whatever stands beside it, and the panel's form changes none of them.
 */
#ifndef TOPWORK_LINEAR_PANEL_H
#define TOPWORK_LINEAR_PANEL_H

#include "linear/blocks.h"
#include "linear/exponent_coding.h"

enum {
    MAX_TILE = LANES == 16 ? 12 : 6, /* rows whose sums stay in registers, TILE_VECTORS each */
    /* Rows for which a step's words become floats where they are multiplied; those of more rows are
     * widened first, which in AVX2 is sooner done for two rows already. */
    MAX_PAIRS_TILE = LANES == 16 ? 12 : 1,
    AHEAD = 16,        /* steps of a panel that are fetched before their use */
    AHEAD_GROUPS = 48, /* of a coded one */
};

enum form { PLAIN_F32, PLAIN_BF16, CODED };

/* What a panel does to some rows. */
struct job {
    const char *x;       /* [rows, row_size bytes]: steps */
    float *y;            /* [rows, y_stride] */
    const float *bias;   /* [PANEL]; NULL: there are sums of the inputs before these */
    const float *sums;   /* [rows, PANEL] */
    const char *weights; /* [steps, PANEL] words, if there is no other form */
    uintptr_t ahead; /* where memory begins that is fetched meanwhile, ahead_size for each step */
    const struct coded_panel *coded; /* or NULL */
    int64_t num_rows, row_size, y_stride, num_steps, num_inputs, num_outputs, ahead_size;
};

/* Return the bytes of a row's step: a float or a pair of bfloat16, or, where the CPU has no dot
 * products, the floats of a pair as widen_row leaves them. */
INLINE int64_t input_bytes(enum form form) { return form == PLAIN_F32 || HAS_DOTS ? 4 : 8; }

INLINE u32v splat_word(const char *from)
{
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word - (u32v){0};
}

/* Add the products of one step. */
INLINE void add_step(int num_rows, int num_vectors, enum form form, const char *x, int64_t row_size,
                     const u32v *words, f32v sums[][PANEL_VECTORS])
{
    if (form == PLAIN_F32 || HAS_DOTS) {
#pragma GCC unroll 12
        for (int row = 0; row < num_rows; row++) {
            u32v inputs = splat_word(x + row * row_size);
#pragma GCC unroll 4
            for (int i = 0; i < num_vectors; i++)
                sums[row][i] = add_words(sums[row][i], inputs, words[i], form != PLAIN_F32);
        }
        return;
    }
    f32v second[PANEL_VECTORS], first[PANEL_VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < num_vectors; i++) {
        second[i] = second_floats(words[i]);
        first[i] = first_floats(words[i]);
    }
#pragma GCC unroll 12
    for (int row = 0; row < num_rows; row++) {
        f32v inputs = (f32v)splat_word(x + row * row_size);
#pragma GCC unroll 4
        for (int i = 0; i < num_vectors; i++)
            sums[row][i] = multiply_add(inputs, second[i], sums[row][i]);
        inputs = (f32v)splat_word(x + row * row_size + 4);
#pragma GCC unroll 4
        for (int i = 0; i < num_vectors; i++)
            sums[row][i] = multiply_add(inputs, first[i], sums[row][i]);
    }
}

INLINE void add_plain(int num_rows, int num_vectors, enum form form, const struct job *job,
                      f32v sums[][PANEL_VECTORS])
{
    const char *x = job->x;
    for (int64_t k = 0; k < job->num_steps; k++, x += input_bytes(form)) {
        u32v words[PANEL_VECTORS];
        for (int i = 0; i < num_vectors * LANES * 4; i += 64)
            prefetch((const void *)job->ahead, k * job->ahead_size + i);
#pragma GCC unroll 4
        for (int i = 0; i < num_vectors; i++)
            words[i] = load_words(job->weights + k * PANEL * 4 + i * LANES * 4);
        add_step(num_rows, num_vectors, form, x, job->row_size, words, sums);
    }
}

INLINE void add_coded(int num_rows, const struct job *job, f32v sums[][PANEL_VECTORS])
{
    const struct coded_panel *p = job->coded;
    code_table table = load_table(p->table);
    const struct outlier *outlier = p->outliers, *end = outlier + p->num_outliers;
    const char *x = job->x;
    int64_t num_groups = job->num_steps / GROUP_STEPS, row_size = job->row_size;
    int64_t size = input_bytes(CODED);
    u32v words[GROUP_VECTORS];
    for (int64_t group = 0;; group++, x += size * GROUP_STEPS) {
        int64_t stop = outlier < end ? outlier->place / GROUP_WORDS : num_groups;
        for (; group < stop; group++, x += size * GROUP_STEPS) {
            const uint8_t *from = p->groups + group * GROUP_BYTES;
            for (int i = 0; i < GROUP_BYTES; i += 64)
                prefetch(from, AHEAD_GROUPS * GROUP_BYTES + i);
            load_group(from, table, words);
            add_step(num_rows, PANEL_VECTORS, CODED, x, row_size, words, sums);
            add_step(num_rows, PANEL_VECTORS, CODED, x + size, row_size, words + PANEL_VECTORS,
                     sums);
        }
        if (group * GROUP_STEPS == job->num_steps)
            return;
        load_group(p->groups + group * GROUP_BYTES, table, words);
        outlier = patch_group(outlier, end, group, words);
        add_step(num_rows, PANEL_VECTORS, CODED, x, row_size, words, sums);
        if (group == num_groups) /* half a group */
            return;
        add_step(num_rows, PANEL_VECTORS, CODED, x + size, row_size, words + PANEL_VECTORS, sums);
    }
}

/* Compute some vectors of outputs: TILE_VECTORS, which are all of a panel in AVX-512, or all. */
INLINE void multiply_tile(int num_rows, int num_vectors, enum form form, const struct job *job)
{
    f32v sums[MAX_TILE][PANEL_VECTORS];
#pragma GCC unroll 12
    for (int row = 0; row < num_rows; row++) {
        const float *from = job->bias == NULL ? job->sums + row * PANEL : job->bias;
#pragma GCC unroll 4
        for (int i = 0; i < num_vectors; i++)
            sums[row][i] = load_f32(from + i * LANES);
    }
    if (form == CODED)
        add_coded(num_rows, job, sums);
    else
        add_plain(num_rows, num_vectors, form, job, sums);
    float *y = job->y;
#pragma GCC unroll 12
    for (int row = 0; row < num_rows; row++, y += job->y_stride)
#pragma GCC unroll 4
        for (int i = 0; i < num_vectors; i++)
            if (job->num_outputs > i * LANES)
                store_some(y, i * LANES, job->num_outputs - i * LANES, false, sums[row][i]);
}

INLINE void multiply_rows(enum form form, const struct job *job)
{
#define ROWS(n) \
    case n: multiply_tile(n, TILE_VECTORS, form, job); break;
    switch (job->num_rows) {
        ROWS(1)
        ROWS(2)
        ROWS(3)
        ROWS(4)
        ROWS(5)
        ROWS(6)
#if LANES == 16
        ROWS(7)
        ROWS(8)
        ROWS(9)
        ROWS(10)
        ROWS(11)
        ROWS(12)
#endif
    }
#undef ROWS
}

#endif
