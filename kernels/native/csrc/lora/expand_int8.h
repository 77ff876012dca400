/* lora_expand where B lies in int8: in panels, and sums are integers. */
#ifndef TOPWORK_LORA_EXPAND_INT8_H
#define TOPWORK_LORA_EXPAND_INT8_H

#include "lora/piece_of_b.h"

enum {
    FETCHED_BYTES = 8192, /* of B before their use */
};

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

/* Return the bytes of a row's A x of one module in int8: the codes, then a scaled_row. */
INLINE int64_t coded_inner_bytes(int64_t num_ranks)
{
    return inner_code_bytes(num_ranks) + (int64_t)sizeof(struct scaled_row);
}

static void expand_int8(const struct lora *op, const struct task *task, const struct piece *piece,
                        const struct piece *next, char *scratch)
{
    const float *gain = address_in(task->slot[SLOT_GAIN]);
    const float *shift = address_in(task->slot[SLOT_SHIFT]);
    int64_t code_bytes = inner_code_bytes(piece->num_ranks);
    struct panel_task t = {
        .u = scratch,
        .scaled = scratch + code_bytes,
        .u_bytes = coded_inner_bytes(piece->num_ranks),
        .ldy = op->y_stride,
        .num_ranks = piece->num_ranks,
    };
    for (int64_t i = 0; i < task->num_rows; i++)
        code_inner(op->inner + (task->first_row + i) * op->inner_stride + piece->first_rank,
                   piece->num_ranks, scratch + i * t.u_bytes, scratch + i * t.u_bytes + code_bytes);
    int64_t num_bytes = int8_bytes_of_b(piece->num_ranks, piece->num_outputs);
    for (int64_t first = 0; first < piece->num_outputs; first += PANEL_OUTPUTS) {
        int64_t before = int8_bytes_of_b(piece->num_ranks, first);
        int64_t output = piece->first_output + first;
        t.num_outputs = smaller(PANEL_OUTPUTS, piece->num_outputs - first);
        t.gain = element_or_null(gain, output, F32);
        t.shift = element_or_null(shift, output, F32);
        t.b = element_or_null(piece->b, before, INT8);
        t.ahead = ahead_of_panel(piece, next, before, num_bytes);
        t.y = op->y + task->first_row * t.ldy + output;
        expand_panel(t, task->num_rows);
    }
}

INLINE int64_t int8_expand_scratch(const struct lora *op)
{
    return INT8_BLOCK_ROWS * coded_inner_bytes(op->inner_stride);
}

#endif
