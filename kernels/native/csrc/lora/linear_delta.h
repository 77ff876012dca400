/* LoRA in int8 of a linear, added to panels of its outputs while these are in a core's cache.
 *
 * lora_shrink has run before. Each row's A x of all modules become int8 once for all panels, and a
 * panel's delta has the bits that lora_expand would give it.
 */
#ifndef TOPWORK_LORA_LINEAR_DELTA_H
#define TOPWORK_LORA_LINEAR_DELTA_H

#include "lora/panel_delta.h"

enum {
    FEW_DELTA_ROWS = 16, /* that each thread brings into int8 for itself */
};

/* What an op adds to the outputs of its linear, whose modules are whole panels. */
struct linear_delta {
    struct lora lora; /* of int8, after its lora_shrink; without a table there is none */
    char *inner;      /* [T, delta_row_bytes]: of no meaning before or afterwards */
};

/* The same for the rows of a step, as a thread sees it. */
struct delta {
    const struct lora *op;
    const struct step *step;
    const char *inner; /* [rows, num_modules, module_bytes] */
    int64_t module_bytes;
};

INLINE int64_t delta_module_bytes(const struct lora *op)
{
    return coded_inner_bytes(op->inner_stride);
}

INLINE int64_t delta_row_bytes(const struct lora *op)
{
    return op->table == NULL ? 0 : op->num_modules * delta_module_bytes(op);
}

INLINE const int64_t *module_of(const int64_t *slot, int64_t index)
{
    return slot + SLOT_FIELDS + index * MODULE_FIELDS;
}

static void code_delta_rows(const struct delta *delta, int64_t first_row, int64_t end_row,
                            char *inner)
{
    const struct lora *op = delta->op;
    for (int64_t i = 0; i < delta->step->num_runs; i++) {
        const struct run *run = delta->step->runs + i;
        const int64_t *slot = slot_of(op, run);
        int64_t end = smaller(run->stop, end_row);
        for (int64_t row = run->start > first_row ? run->start : first_row;
             row < end && slot[SLOT_A] != 0; row++)
            for (int64_t j = 0; j < op->num_modules; j++) {
                const int64_t *module = module_of(slot, j);
                code_inner(op->inner + row * op->inner_stride + module[MODULE_FIRST_RANK],
                           module[MODULE_RANKS],
                           inner + (row * op->num_modules + j) * delta->module_bytes);
            }
    }
}

/* Tell whether rows become int8 in memory of all threads, which have to meet then. */
INLINE bool shares_delta_rows(const struct lora *op, int64_t num_rows)
{
    return op->table != NULL && num_rows > FEW_DELTA_ROWS;
}

/* Return the bytes that few rows take. */
INLINE int64_t few_delta_bytes(const struct linear_delta *linear)
{
    return round_up(FEW_DELTA_ROWS * delta_row_bytes(&linear->lora), LINE);
}

/* Bring the A x of a step's rows into int8: in `few`, or each thread a share of them for all. */
INLINE struct delta begin_delta(const struct linear_delta *linear, const struct worker *worker,
                                char *few)
{
    const struct lora *op = &linear->lora;
    int64_t num_rows = worker->step->num_rows;
    struct delta delta = {op, worker->step, few, 0};
    if (op->table == NULL)
        return delta;
    delta.module_bytes = delta_module_bytes(op);
    if (!shares_delta_rows(op, num_rows)) {
        code_delta_rows(&delta, 0, num_rows, few);
        return delta;
    }
    code_delta_rows(&delta, begin_of_share(worker, worker->index, num_rows),
                    begin_of_share(worker, worker->index + 1, num_rows), linear->inner);
    delta.inner = linear->inner;
    return delta;
}

/* A panel among those of its module. */
struct module_panel {
    int64_t index, panel, output;
};

INLINE struct module_panel module_panel(const struct lora *op, int64_t panel)
{
    struct module_panel place = {.panel = panel, .output = panel * PANEL_OUTPUTS};
    for (int64_t count; place.panel >= (count = op->module_widths[place.index] / PANEL_OUTPUTS);
         place.index++)
        place.panel -= count;
    return place;
}

/* Add the delta of some rows of a run to one panel. */
static void add_run_delta(const struct delta *delta, const int64_t *slot,
                          const struct module_panel *place, struct span rows, float *y, int64_t ldy)
{
    const int64_t *module = module_of(slot, place->index);
    int64_t num_ranks = module[MODULE_RANKS], size = int8_bytes_of_b(num_ranks, PANEL_OUTPUTS);
    int64_t num_modules = delta->op->num_modules;
    if (num_ranks == 0 && slot[SLOT_GAIN] == 0 && slot[SLOT_SHIFT] == 0)
        return;
    struct panel_task t = {
        .y = y,
        .gain = element_or_null(address_in(slot[SLOT_GAIN]), place->output, F32),
        .shift = element_or_null(address_in(slot[SLOT_SHIFT]), place->output, F32),
        .u = delta->inner + (rows.first * num_modules + place->index) * delta->module_bytes,
        .b = element_or_null(address_in(module[MODULE_B]), place->panel * size, INT8),
        .ldy = ldy,
        .u_bytes = num_modules * delta->module_bytes,
        .num_ranks = num_ranks,
        .num_outputs = PANEL_OUTPUTS,
    };
    t.ahead =
        (uintptr_t)t.b + (uintptr_t)size; /* the panel that this thread most often does next */
    expand_panel(t, rows.end - rows.first);
}

/* Add to a panel of the outputs of some rows, of which y is the first. */
static void add_delta(const struct delta *delta, struct span block, int64_t panel, float *y,
                      int64_t ldy)
{
    if (delta->op->table == NULL)
        return;
    struct module_panel place = module_panel(delta->op, panel);
    for (int64_t i = 0; i < delta->step->num_runs; i++) {
        const struct run *run = delta->step->runs + i;
        const int64_t *slot = slot_of(delta->op, run);
        struct span rows = {run->start > block.first ? run->start : block.first,
                            smaller(run->stop, block.end)};
        if (rows.first < rows.end && slot[SLOT_A] != 0)
            add_run_delta(delta, slot, &place, rows, y + (rows.first - block.first) * ldy, ldy);
    }
}

#endif
