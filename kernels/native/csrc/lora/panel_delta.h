/* Panels of B in int8, times rows' A x: what is added is B (A x).
 *
 * B stands in panels of 32 outputs, the last of what is left, each read four lora_ranks at a time;
 * zeros stand behind the last. Of each row the A x of one module become int8 with one scale, as
 * rows of linears do (linear/quantized_rows.h). What is added is float(sum of the products of
 * codes) * that scale, rounded by itself: the same bits on all machines.
 */
#ifndef TOPWORK_LORA_PANEL_DELTA_H
#define TOPWORK_LORA_PANEL_DELTA_H

#include "lora/lora.h"
#include "simd/scales.h"

enum {
    NUM_VECTORS = PANEL_OUTPUTS / LANES,
    PANEL_ROWS = LANES == 16 ? 8 : 2, /* whose sums stay in registers */
};

/* Some rows, and a panel of B. */
struct panel_task {
    float *y;                  /* of the first row and output */
    const float *gain, *shift; /* of the first output, or NULL */
    const char *u;             /* [rows, u_bytes]: codes of A x of the module */
    const char *scaled;        /* [rows, u_bytes]: the scaled_row of each */
    const char *b;
    uintptr_t ahead; /* what is fetched meanwhile; 0: nothing */
    int64_t ldy, u_bytes, num_ranks, num_outputs;
};

/* Return the bytes of codes for so many lora_ranks: whole lines. */
INLINE int64_t inner_code_bytes(int64_t num_ranks)
{
    return round_up(num_ranks * INPUT_BYTES, LINE);
}

/* Write a row's A x of one module in int8, zeros behind the last lora_rank up to a whole line. */
INLINE void code_inner(const float *u, int64_t num_ranks, char *to, char *scaled_to)
{
    int32_t largest = largest_bits(u, num_ranks, false);
    struct scaled_row scaled = {.scale = scale_of(largest)};
    float inverse = inverse_of(scaled.scale, largest);
    i32v shifts = {0};
    for (int64_t i = 0; i < num_ranks; i += LANES) {
        i32v codes = {0};
        if (scaled.scale > 0)
            codes = nearest_words(load_some(u, i, num_ranks - i, false) * inverse);
        store_byte_inputs((int8_t *)to + i * INPUT_BYTES, narrow_to_bytes(codes));
        shifts += shifts_of(codes);
    }
    int64_t end = round_up(num_ranks, LANES) * INPUT_BYTES;
    memset(to + end, 0, (size_t)(inner_code_bytes(num_ranks) - end));
    scaled.shift = sum_of_words(shifts);
    memcpy(scaled_to, &scaled, sizeof scaled);
}

/* Fetch what the next tile reads of its rows: of many, the first cache doesn't keep all from panel
 * to panel. */
INLINE void fetch_next_rows(int num_rows, const struct panel_task *t)
{
#pragma GCC unroll 8
    for (int64_t i = num_rows; i < 2 * num_rows; i++) {
        prefetch_near(t->u, i * t->u_bytes);
        prefetch_near(t->scaled, i * t->u_bytes);
    }
}

INLINE f32v add_to_output(const struct panel_task *t, int row, int64_t at, bool is_whole,
                          f32v delta)
{
    int64_t left = is_whole ? LANES : t->num_outputs - at;
    f32v y = load_some(t->y + row * t->ldy, at, left, false);
    if (t->gain != NULL || t->shift != NULL) {
        f32v gain = t->gain == NULL ? splat(1) : load_some(t->gain, at, left, false);
        f32v shift = t->shift == NULL ? splat(0) : load_some(t->shift, at, left, false);
        y = multiply_add(y, gain, shift);
    }
    return t->num_ranks > 0 ? y + delta : y;
}

INLINE void multiply_panel(int num_rows, const struct panel_task *t, bool is_whole)
{
    i32v sums[PANEL_ROWS][NUM_VECTORS];
    struct scaled_row scaled[PANEL_ROWS];
    int64_t line = is_whole ? PANEL_OUTPUTS * QUAD : t->num_outputs * QUAD;
    fetch_next_rows(num_rows, t);
#pragma GCC unroll 8
    for (int i = 0; i < num_rows; i++) {
        memcpy(&scaled[i], t->scaled + i * t->u_bytes, sizeof scaled[i]);
#pragma GCC unroll 4
        for (int j = 0; j < NUM_VECTORS; j++)
            sums[i][j] = dot_start(scaled[i].shift);
    }
    const int8_t *codes = (const int8_t *)t->u;
    int64_t num_quads = parts(t->num_ranks, QUAD);
    for (int64_t quad = 0; quad < num_quads; quad++, codes += QUAD * INPUT_BYTES) {
        const char *b = t->b + quad * line;
        u32v weights[NUM_VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < NUM_VECTORS; j++)
            weights[j] = load_quads(b, j * LANES, is_whole ? PANEL_OUTPUTS : t->num_outputs);
        for (int64_t at = 0; t->ahead != 0 && at < line; at += LINE)
            prefetch((const void *)t->ahead, quad * line + at);
#pragma GCC unroll 8
        for (int i = 0; i < num_rows; i++) {
            struct quad x = splat_quad(codes + i * t->u_bytes);
#pragma GCC unroll 4
            for (int j = 0; j < NUM_VECTORS; j++)
                sums[i][j] = dot_quads(sums[i][j], x, weights[j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < num_rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < NUM_VECTORS; j++) {
            int64_t at = j * LANES;
            if (!is_whole && at >= t->num_outputs)
                break;
            f32v delta = as_rounded(words_to_floats(sums[i][j]) * scaled[i].scale);
            f32v y = add_to_output(t, i, at, is_whole, delta);
            store_some(t->y + i * t->ldy, at, is_whole ? LANES : t->num_outputs - at, false, y);
        }
}

#define DEFINE_PANEL(name, is_whole)                               \
    static void name(int64_t num_rows, const struct panel_task *t) \
    {                                                              \
        switch (num_rows) {                                        \
            PANEL_CASES(is_whole)                                  \
        }                                                          \
    }
#define PANEL_CASE(n, is_whole) \
    case n: multiply_panel(n, t, is_whole); break;
#if LANES == 16
#define PANEL_CASES(is_whole) \
    PANEL_CASE(1, is_whole)   \
    PANEL_CASE(2, is_whole)   \
    PANEL_CASE(3, is_whole)   \
    PANEL_CASE(4, is_whole)   \
    PANEL_CASE(5, is_whole)   \
    PANEL_CASE(6, is_whole)   \
    PANEL_CASE(7, is_whole)   \
    PANEL_CASE(8, is_whole)
#else
#define PANEL_CASES(is_whole) \
    PANEL_CASE(1, is_whole)   \
    PANEL_CASE(2, is_whole)
#endif
DEFINE_PANEL(multiply_whole_panel, true)
DEFINE_PANEL(multiply_last_panel, false)

/* Do a panel for rows whose A x stand in int8 one behind the other. */
static void expand_panel(struct panel_task t, int64_t num_rows)
{
    bool is_whole = t.num_outputs == PANEL_OUTPUTS;
    for (int64_t left = num_rows, count; left > 0; left -= count, t.ahead = 0) {
        count = smaller(PANEL_ROWS, left);
        (is_whole ? multiply_whole_panel : multiply_last_panel)(count, &t);
        t.y += count * t.ldy;
        t.u += count * t.u_bytes;
        t.scaled += count * t.u_bytes;
    }
}

#endif
