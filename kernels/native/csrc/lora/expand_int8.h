/* lora_expand where B lies in int8: A x becomes int8, and sums are integers.
 *
 * B stands in panels of 32 outputs, the last of what is left, each read four lora_ranks at a time;
 * zeros stand behind the last. Of each row the A x of one module have one scale, as rows of linears
 * have (linear/quantized_rows.h). What is added is float(sum of the products of codes) * that
 * scale, rounded by itself: the same bits on all machines.
 */
#ifndef TOPWORK_LORA_EXPAND_INT8_H
#define TOPWORK_LORA_EXPAND_INT8_H

#include "linear/quantized_rows.h"
#include "lora/piece_of_b.h"

enum {
    PANEL_OUTPUTS = 32,
    NUM_VECTORS = PANEL_OUTPUTS / LANES,
    PANEL_ROWS = LANES == 16 ? 8 : 2, /* whose sums stay in registers */
    FETCHED_BYTES = 8192,             /* of B before their use */
};

/* Some rows, and a panel of B. */
struct panel_task {
    float *y;                  /* of the first row and output */
    const float *gain, *shift; /* of the first output, or NULL */
    const char *u;             /* [rows, the form's] */
    struct coded_form form;
    const char *b;
    uintptr_t ahead; /* what is fetched meanwhile; 0: nothing */
    int64_t ldy, num_quads, num_outputs;
};

/* Return how a row's A x of one module lie in int8. */
INLINE struct coded_form form_of_inner(int64_t num_ranks)
{
    int64_t code_bytes = round_up(num_ranks, LANES);
    return (struct coded_form){code_bytes, code_bytes + (int64_t)sizeof(struct scaled_row)};
}

INLINE void code_inner(const float *u, int64_t num_ranks, char *to)
{
    int32_t largest = largest_bits(u, num_ranks, false);
    struct scaled_row scaled = {.scale = scale_of(largest)};
    float inverse = scaled.scale > 0 ? (float)LARGEST_BYTE / float_of(largest) : 0;
    i32v sum = {0};
    for (int64_t i = 0; i < num_ranks; i += LANES) {
        i32v codes = {0};
        if (scaled.scale > 0)
            codes = nearest_words(load_some(u, i, num_ranks - i, false) * inverse);
        i8v bytes = narrow_to_bytes(codes);
        memcpy(to + i, &bytes, sizeof bytes);
        sum += codes;
    }
    scaled.sum = sum_of_words(sum);
    memcpy(to + form_of_inner(num_ranks).code_bytes, &scaled, sizeof scaled);
}

/* Load four lora_ranks of LANES outputs from `first` on; zeros where there are none. */
INLINE u32v load_quads(const char *b, int64_t first, int64_t num_outputs)
{
    return first < num_outputs ? load_some_words(b + first * QUAD, num_outputs - first) : (u32v){0};
}

INLINE f32v add_delta(const struct panel_task *t, int row, int64_t at, bool is_whole, f32v delta)
{
    int64_t left = is_whole ? LANES : t->num_outputs - at;
    f32v y = load_some(t->y + row * t->ldy, at, left, false);
    if (t->gain != NULL || t->shift != NULL) {
        f32v gain = t->gain == NULL ? splat(1) : load_some(t->gain, at, left, false);
        f32v shift = t->shift == NULL ? splat(0) : load_some(t->shift, at, left, false);
        y = multiply_add(y, gain, shift);
    }
    return t->num_quads > 0 ? y + delta : y;
}

INLINE void multiply_panel(int num_rows, const struct panel_task *t, bool is_whole)
{
    i32v sums[PANEL_ROWS][NUM_VECTORS];
    struct scaled_row scaled[PANEL_ROWS];
    int64_t line = is_whole ? PANEL_OUTPUTS * QUAD : t->num_outputs * QUAD;
#pragma GCC unroll 8
    for (int i = 0; i < num_rows; i++) {
        memcpy(&scaled[i], t->u + i * t->form.row_bytes + t->form.code_bytes, sizeof scaled[i]);
#pragma GCC unroll 4
        for (int j = 0; j < NUM_VECTORS; j++)
            sums[i][j] = dot_start(scaled[i].sum);
    }
    for (int64_t quad = 0; quad < t->num_quads; quad++) {
        const char *b = t->b + quad * line;
        u32v weights[NUM_VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < NUM_VECTORS; j++)
            weights[j] = load_quads(b, j * LANES, is_whole ? PANEL_OUTPUTS : t->num_outputs);
        for (int64_t at = 0; t->ahead != 0 && at < line; at += LINE)
            prefetch((const void *)t->ahead, quad * line + at);
#pragma GCC unroll 8
        for (int i = 0; i < num_rows; i++) {
            struct quad x = splat_quad((const int8_t *)t->u + i * t->form.row_bytes + quad * QUAD);
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
            f32v y = add_delta(t, i, at, is_whole, delta);
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

/* Return what to fetch beside the panel that begins with byte `at` of a piece of so many. */
INLINE uintptr_t ahead_of_panel(const struct piece *piece, const struct piece *next, int64_t at,
                                int64_t num_bytes)
{
    at += FETCHED_BYTES;
    if (at < num_bytes)
        return (uintptr_t)piece->b + (uintptr_t)at;
    return next->b == NULL ? 0 : (uintptr_t)next->b + (uintptr_t)(at - num_bytes);
}

INLINE void fetch_panels(const struct piece *piece)
{
    int64_t num_bytes = int8_bytes_of_b(piece->num_ranks, piece->num_outputs);
    for (int64_t at = 0; at < smaller(num_bytes, FETCHED_BYTES); at += LINE)
        prefetch(piece->b, at);
}

static void expand_int8(const struct lora *op, const struct task *task, const struct piece *piece,
                        const struct piece *next, char *scratch)
{
    const float *gain = address_in(task->slot[SLOT_GAIN]);
    const float *shift = address_in(task->slot[SLOT_SHIFT]);
    struct panel_task t = {
        .form = form_of_inner(piece->num_ranks),
        .ldy = op->y_stride,
        .num_quads = parts(piece->num_ranks, QUAD),
    };
    for (int64_t i = 0; i < task->num_rows; i++)
        code_inner(op->inner + (task->first_row + i) * op->inner_stride + piece->first_rank,
                   piece->num_ranks, scratch + i * t.form.row_bytes);
    int64_t num_bytes = int8_bytes_of_b(piece->num_ranks, piece->num_outputs);
    for (int64_t first = 0; first < piece->num_outputs; first += PANEL_OUTPUTS) {
        int64_t before = int8_bytes_of_b(piece->num_ranks, first);
        int64_t output = piece->first_output + first;
        t.num_outputs = smaller(PANEL_OUTPUTS, piece->num_outputs - first);
        t.gain = gain == NULL ? NULL : gain + output;
        t.shift = shift == NULL ? NULL : shift + output;
        t.b = element_or_null(piece->b, before, INT8);
        t.ahead = ahead_of_panel(piece, next, before, num_bytes);
        for (int64_t row = 0, num_rows; row < task->num_rows; row += num_rows, t.ahead = 0) {
            num_rows = smaller(PANEL_ROWS, task->num_rows - row);
            t.y = op->y + (task->first_row + row) * t.ldy + output;
            t.u = scratch + row * t.form.row_bytes;
            (t.num_outputs == PANEL_OUTPUTS ? multiply_whole_panel : multiply_last_panel)(num_rows,
                                                                                          &t);
        }
    }
}

INLINE int64_t int8_expand_scratch(const struct lora *op)
{
    return BLOCK_ROWS * form_of_inner(op->inner_stride).row_bytes;
}

#endif
