/* The gate and up of an MLP in one linear, and what is made of both.
 *
 * A task is a panel of gates and the panel of ups beside it, for a block of rows: their outputs
 * stay in a core's cache until they are multiplied, and only the product is written to memory.
 * LoRA in int8 adds to them there (lora/linear_delta.h); where others have to, they are written as
 * any linear's.
 */
#ifndef TOPWORK_LINEAR_GATED_H
#define TOPWORK_LINEAR_GATED_H

#include "linear/blocks.h"
#include "simd/sigmoid.h"

enum {
    GATED_ROWS = 256, /* of a block at most; decides speed only */
};

struct gated {
    void *out; /* [T, I] of the dtype of x */
    int64_t is_gelu;
};

INLINE struct rows_and_panels gated_rows_and_panels(int64_t num_rows, int64_t block_rows,
                                                    int64_t num_outputs)
{
    return (struct rows_and_panels){num_rows, smaller(block_rows, GATED_ROWS),
                                    num_outputs / 2 / PANEL};
}

/* Return the bytes for a block's outputs, and those before them. */
INLINE int64_t gated_scratch(int64_t linear_scratch)
{
    return round_up(linear_scratch, LINE) + GATED_ROWS * 2 * PANEL * (int64_t)sizeof(float);
}

/* Return where the outputs of a panel of gates go; those of ups stand behind them. */
INLINE struct outputs gated_outputs(const struct worker *worker, int64_t linear_scratch)
{
    char *behind = (char *)worker->scratch + round_up(linear_scratch, LINE);
    return (struct outputs){(float *)behind, 2 * PANEL};
}

INLINE struct outputs behind_gates(struct outputs gates)
{
    return (struct outputs){gates.y + PANEL, gates.stride};
}

/* Return the block of ups beside one of gates. */
INLINE struct block ups_of(struct block block, int64_t num_panels)
{
    block.panel += num_panels;
    block.weight_panel += num_panels;
    return block;
}

INLINE void add_gated_delta(const struct delta *delta, struct block gates, struct block ups,
                            struct outputs to)
{
    add_block_delta(delta, gates, to);
    add_block_delta(delta, ups, behind_gates(to));
}

/* Write what is made of a block's gates and ups. */
INLINE void write_gated(const struct gated *gated, struct block block, struct outputs gates,
                        int64_t width, bool is_bf16)
{
    char *out = gated->out;
    for (int64_t row = block.first_row; row < block.end_row; row++, gates.y += gates.stride) {
        char *to = out + (row * width + block.panel * PANEL) * (is_bf16 ? 2 : 4);
        if (gated->is_gelu)
            store_gated(gates.y, gates.y + PANEL, PANEL, true, to, is_bf16);
        else
            store_gated(gates.y, gates.y + PANEL, PANEL, false, to, is_bf16);
    }
}

#endif
