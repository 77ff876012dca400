/* LoRA in int8 of the gates and ups of an MLP, added while their outputs are in a core's cache.
 *
 * lora_shrink has run before. Each row's A x of both modules become int8 once for all panels, and a
 * panel's delta has the bits that lora_expand would give it.
 */
#ifndef TOPWORK_LORA_GATED_DELTA_H
#define TOPWORK_LORA_GATED_DELTA_H

#include "lora/panel_delta.h"

enum {
    GATED_MODULES = 2,
    FEW_DELTA_ROWS = 16, /* that each thread brings into int8 for itself */
};

/* What is added to the rows of a step, as a thread sees it. */
struct gated_delta {
    const struct lora *op; /* without a table there is none */
    const struct step *step;
    const char *inner; /* [rows, GATED_MODULES, module_bytes] */
    int64_t module_bytes;
};

INLINE int64_t delta_module_bytes(const struct lora *op)
{
    return coded_inner_bytes(op->inner_stride);
}

INLINE int64_t delta_row_bytes(const struct lora *op)
{
    return op->table == NULL ? 0 : GATED_MODULES * delta_module_bytes(op);
}

INLINE const int64_t *module_of(const int64_t *slot, int64_t index)
{
    return slot + SLOT_FIELDS + index * MODULE_FIELDS;
}

static void code_delta_rows(const struct gated_delta *delta, int64_t first_row, int64_t end_row,
                            char *inner)
{
    const struct lora *op = delta->op;
    for (int64_t i = 0; i < delta->step->num_runs; i++) {
        const struct run *run = delta->step->runs + i;
        const int64_t *slot = slot_of(op, run);
        int64_t end = smaller(run->stop, end_row);
        for (int64_t row = run->start > first_row ? run->start : first_row;
             row < end && slot[SLOT_A] != 0; row++)
            for (int64_t j = 0; j < GATED_MODULES; j++) {
                const int64_t *module = module_of(slot, j);
                code_inner(op->inner + row * op->inner_stride + module[MODULE_FIRST_RANK],
                           module[MODULE_RANKS],
                           inner + (row * GATED_MODULES + j) * delta->module_bytes);
            }
    }
}

/* Tell whether rows become int8 in memory of all threads, which have to meet then. */
INLINE bool shares_delta_rows(const struct lora *op, int64_t num_rows)
{
    return op->table != NULL && num_rows > FEW_DELTA_ROWS;
}

/* Bring the A x of a step's rows into int8: in `few`, or each thread a share of them in `shared`.
 */
static struct gated_delta begin_delta(const struct lora *op, const struct worker *worker, char *few,
                                      char *shared)
{
    int64_t num_rows = worker->step->num_rows;
    struct gated_delta delta = {op, worker->step, few, 0};
    if (op->table == NULL)
        return delta;
    delta.module_bytes = delta_module_bytes(op);
    if (!shares_delta_rows(op, num_rows)) {
        code_delta_rows(&delta, 0, num_rows, few);
        return delta;
    }
    code_delta_rows(&delta, begin_of_share(worker, worker->index, num_rows),
                    begin_of_share(worker, worker->index + 1, num_rows), shared);
    delta.inner = shared;
    return delta;
}

/* Add the delta of some rows of a run to one panel of the gates or of the ups. */
static void add_module_delta(const struct gated_delta *delta, const int64_t *slot, int64_t index,
                             int64_t panel, struct span rows, float *y, int64_t ldy)
{
    const int64_t *module = module_of(slot, index);
    int64_t num_ranks = module[MODULE_RANKS], size = int8_bytes_of_b(num_ranks, PANEL_OUTPUTS);
    int64_t output = index * delta->op->module_widths[0] + panel * PANEL_OUTPUTS;
    if (num_ranks == 0 && slot[SLOT_GAIN] == 0 && slot[SLOT_SHIFT] == 0)
        return;
    struct panel_task t = {
        .y = y,
        .gain = element_or_null(address_in(slot[SLOT_GAIN]), output, F32),
        .shift = element_or_null(address_in(slot[SLOT_SHIFT]), output, F32),
        .u = delta->inner + (rows.first * GATED_MODULES + index) * delta->module_bytes,
        .b = element_or_null(address_in(module[MODULE_B]), panel * size, INT8),
        .ldy = ldy,
        .u_bytes = GATED_MODULES * delta->module_bytes,
        .num_ranks = num_ranks,
        .num_outputs = PANEL_OUTPUTS,
    };
    t.ahead =
        (uintptr_t)t.b + (uintptr_t)size; /* the panel that this thread most often does next */
    expand_panel(t, rows.end - rows.first);
}

/* Add the deltas of a panel of gates, and of the ups beside it, to the rows of a block. */
static void add_gated_delta(const struct gated_delta *delta, struct span block, int64_t panel,
                            float *gates, float *ups, int64_t stride)
{
    for (int64_t i = 0; delta->op->table != NULL && i < delta->step->num_runs; i++) {
        const struct run *run = delta->step->runs + i;
        const int64_t *slot = slot_of(delta->op, run);
        struct span rows = {run->start > block.first ? run->start : block.first,
                            smaller(run->stop, block.end)};
        if (rows.first >= rows.end || slot[SLOT_A] == 0)
            continue;
        int64_t before = (rows.first - block.first) * stride;
        add_module_delta(delta, slot, 0, panel, rows, gates + before, stride);
        add_module_delta(delta, slot, 1, panel, rows, ups + before, stride);
    }
}

#endif
