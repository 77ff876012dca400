/* The gate and up of an MLP in one linear, and what is made of both.
 *
 * A task is a panel of gates and the panel of ups beside it, for a block of rows: their outputs
 * stay in a core's cache until they are multiplied, and only the product is written to memory.
 * Adapters in int8 add to them there; where others have to, they are written as any linear's.
 */
#ifndef TOPWORK_LINEAR_GATED_H
#define TOPWORK_LINEAR_GATED_H

#include "linear/blocks.h"
#include "lora/gated_delta.h"
#include "simd/sigmoid.h"

enum {
    GATED_ROWS = 256, /* of a block at most; decides speed only */
};

struct gated {
    void *out;        /* [T, I] of the dtype of x */
    struct lora lora; /* of int8, after its lora_shrink; or without a table */
    char *inner;      /* [T, delta_row_bytes]: of no meaning before or afterwards */
    int64_t is_gelu;
};

INLINE struct rows_and_panels gated_rows_and_panels(int64_t num_rows, int64_t block_rows,
                                                    int64_t num_outputs)
{
    return (struct rows_and_panels){num_rows, smaller(block_rows, GATED_ROWS),
                                    num_outputs / 2 / PANEL};
}

INLINE int64_t few_delta_bytes(const struct gated *gated)
{
    return round_up(FEW_DELTA_ROWS * delta_row_bytes(&gated->lora), LINE);
}

/* Return the bytes for a block's outputs and few rows' A x, and those before them. */
INLINE int64_t gated_scratch(const struct gated *gated, int64_t linear_scratch)
{
    return round_up(linear_scratch, LINE) + few_delta_bytes(gated)
           + GATED_ROWS * 2 * PANEL * (int64_t)sizeof(float);
}

/* What a thread has of its own for blocks. */
struct gated_work {
    struct outputs gates; /* those of ups stand behind them */
    struct gated_delta delta;
};

/* Begin an op on whose threads may have to meet before they begin with its tasks. */
INLINE struct gated_work begin_gated(const struct gated *gated, const struct worker *worker,
                                     int64_t linear_scratch)
{
    char *behind = (char *)worker->scratch + round_up(linear_scratch, LINE);
    float *gates = (float *)(behind + few_delta_bytes(gated));
    return (struct gated_work){
        {gates, 2 * PANEL},
        begin_delta(&gated->lora, worker, behind, gated->inner),
    };
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

/* Write what is made of a block's gates and ups. */
INLINE void write_gated(const struct gated *gated, struct block block,
                        const struct gated_work *work, int64_t width, bool is_bf16)
{
    struct outputs gates = work->gates;
    char *out = gated->out;
    add_gated_delta(&work->delta, (struct span){block.first_row, block.end_row}, block.panel,
                    gates.y, gates.y + PANEL, gates.stride);
    for (int64_t row = block.first_row; row < block.end_row; row++, gates.y += gates.stride) {
        char *to = out + (row * width + block.panel * PANEL) * (is_bf16 ? 2 : 4);
        if (gated->is_gelu)
            store_gated(gates.y, gates.y + PANEL, PANEL, true, to, is_bf16);
        else
            store_gated(gates.y, gates.y + PANEL, PANEL, false, to, is_bf16);
    }
}

#endif
