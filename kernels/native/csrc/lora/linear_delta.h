/* LoRA in int8 of a linear, added to panels of its outputs while these are in a core's cache.
 *
 * lora_shrink has run before. Each row's A x of all modules become int8 once for all panels, and a
 * panel's delta has the bits that lora_expand would give it.
 */
#ifndef TOPWORK_LORA_LINEAR_DELTA_H
#define TOPWORK_LORA_LINEAR_DELTA_H

#include "lora/tile_delta.h"

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
    const char *inner; /* [rows, row_bytes]: codes of each module, then the scaled_row of each */
    int64_t code_bytes, row_bytes;
    struct delta_tiling tiling;
};

INLINE int64_t delta_row_bytes(const struct lora *op)
{
    int64_t module_bytes = inner_code_bytes(op->inner_stride) + (int64_t)sizeof(struct scaled_row);
    return op->table == NULL ? 0 : round_up(op->num_modules * module_bytes, LINE);
}

/* Return where in a row the codes of a module are, and where its scaled_row is. */
INLINE int64_t codes_of_module(const struct delta *delta, int64_t module)
{
    return module * delta->code_bytes;
}

INLINE int64_t scaled_of_module(const struct delta *delta, int64_t module)
{
    return delta->op->num_modules * delta->code_bytes + module * (int64_t)sizeof(struct scaled_row);
}

INLINE const int64_t *module_of(const int64_t *slot, int64_t index)
{
    return slot + SLOT_FIELDS + index * MODULE_FIELDS;
}

INLINE void code_delta_row(const struct delta *delta, const int64_t *slot, int64_t row, char *to)
{
    const struct lora *op = delta->op;
    for (int64_t j = 0; j < op->num_modules; j++) {
        const int64_t *module = module_of(slot, j);
        code_inner(op->inner + row * op->inner_stride + module[MODULE_FIRST_RANK],
                   module[MODULE_RANKS], to + codes_of_module(delta, j),
                   to + scaled_of_module(delta, j));
    }
}

/* Bring rows into int8. */
static void code_delta_rows(const struct delta *delta, int64_t first_row, int64_t end_row,
                            char *inner)
{
    for (int64_t i = 0; i < delta->step->num_runs; i++) {
        const struct run *run = delta->step->runs + i;
        const int64_t *slot = slot_of(delta->op, run);
        int64_t end = smaller(run->stop, end_row);
        for (int64_t row = run->start > first_row ? run->start : first_row;
             row < end && slot[SLOT_A] != 0; row++)
            code_delta_row(delta, slot, row, inner + row * delta->row_bytes);
    }
}

/* Tell whether rows become int8 in memory of all threads, which have to meet then. */
INLINE bool shares_delta_rows(const struct lora *op, int64_t num_rows)
{
    return op->table != NULL && num_rows > FEW_DELTA_ROWS;
}

/* Return the bytes that a thread needs: for few rows, and for tiles. */
INLINE int64_t delta_scratch(const struct linear_delta *linear)
{
    int64_t row_bytes = delta_row_bytes(&linear->lora);
    return row_bytes == 0 ? 0 : FEW_DELTA_ROWS * row_bytes + (int64_t)DELTA_TILING;
}

/* Bring the A x of a step's rows into int8: where they are few, in memory of the thread, of which
 * `scratch` is as much as delta_scratch says; else each thread a share of them for all. */
INLINE struct delta begin_delta(const struct linear_delta *linear, const struct worker *worker,
                                char *scratch, struct tile_rows *told)
{
    const struct lora *op = &linear->lora;
    const struct step *step = worker->step;
    struct delta delta = {.op = op, .step = step};
    if (op->table == NULL || step->num_runs == 0)
        return delta;
    int64_t first = 0, end = step->num_rows;
    char *inner = scratch + DELTA_TILING;
    if (shares_delta_rows(op, step->num_rows)) {
        inner = linear->inner;
        first = begin_of_share(worker, worker->index, step->num_rows);
        end = begin_of_share(worker, worker->index + 1, step->num_rows);
    }
    delta.code_bytes = inner_code_bytes(op->inner_stride);
    delta.row_bytes = delta_row_bytes(op);
    delta.tiling = (struct delta_tiling){scratch, told};
    code_delta_rows(&delta, first, end, inner);
    delta.inner = inner;
    return delta;
}

/* Where outputs of rows go: the first row's, and numbers from there to the next row's. */
struct outputs {
    float *y;
    int64_t stride;
};

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

INLINE const char *panel_of_b(const int64_t *module, int64_t panel)
{
    int64_t size = int8_bytes_of_b(module[MODULE_RANKS], PANEL_OUTPUTS);
    return element_or_null(address_in(module[MODULE_B]), panel * size, INT8);
}

/* Return a run's part in one panel of the outputs of a block, of which y is that of `row`. */
INLINE struct panel_task panel_of_run(const struct delta *delta, const struct run *run,
                                      const struct module_panel *place, int64_t row, float *y,
                                      int64_t ldy)
{
    const int64_t *slot = slot_of(delta->op, run), *module = module_of(slot, place->index);
    const char *inner = delta->inner + row * delta->row_bytes;
    return (struct panel_task){
        .y = y,
        .gain = element_or_null(address_in(slot[SLOT_GAIN]), place->output, F32),
        .shift = element_or_null(address_in(slot[SLOT_SHIFT]), place->output, F32),
        .u = inner + codes_of_module(delta, place->index),
        .scaled = inner + scaled_of_module(delta, place->index),
        .b = panel_of_b(module, place->panel),
        .ldy = ldy,
        .u_bytes = delta->row_bytes,
        .num_ranks = module[MODULE_RANKS],
        .num_outputs = PANEL_OUTPUTS,
    };
}

/* Add the delta of rows of a run in a pass to a panel of their outputs. */
static void add_run_delta(const struct delta *delta, const struct module_panel *place,
                          struct panel_task task, struct span pass, struct span rows, bool is_first)
{
    int64_t num_ranks = task.num_ranks;
    bool is_tiled =
        may_use_byte_tiles() && num_ranks > 0 && rows.end - rows.first > FEW_FOR_DELTA_TILES;
    if (is_first && may_use_byte_tiles()) /* what this thread most often reads next is fetched */
        task.ahead = (uintptr_t)task.b
                     + (uintptr_t)(is_tiled ? bytes_read_in_tiles(num_ranks)
                                            : int8_bytes_of_b(num_ranks, PANEL_OUTPUTS));
    if (!is_tiled) {
        expand_panel(task, rows.end - rows.first);
        return;
    }
    int64_t outputs_left = delta->op->module_widths[place->index] - place->panel * PANEL_OUTPUTS;
    struct delta_part part = {
        .task = task,
        .end_of_b = task.b + int8_bytes_of_b(num_ranks, outputs_left),
        .first = rows.first - pass.first,
        .end = rows.end - pass.first,
        .num_rows = pass.end - pass.first,
    };
    add_in_tiles(&part, &delta->tiling);
}

/* What of B is fetched while a block's rows are multiplied by a panel of their linear: what will be
 * added to them. Not with tiles: a pass of theirs has all rows of most steps, so that it would be
 * asked for at once; there the next panel of B is, piece by piece, while one is added. */
struct b_fetching {
    const struct delta *delta;
    const struct run *run, *end; /* whose panels have not been fetched */
    struct module_panel place;
};

INLINE struct b_fetching begin_to_fetch_b(const struct delta *delta, int64_t first_row,
                                          int64_t panel)
{
    if (delta == NULL || delta->inner == NULL || may_use_byte_tiles())
        return (struct b_fetching){0};
    const struct run *run = delta->step->runs, *end = run + delta->step->num_runs;
    while (run < end && run->stop <= first_row)
        run++;
    return (struct b_fetching){delta, run, end, module_panel(delta->op, panel)};
}

/* Fetch the panels of B of runs that begin before a row. */
INLINE void fetch_b(struct b_fetching *fetching, int64_t end_row)
{
    for (; fetching->run < fetching->end && fetching->run->start < end_row; fetching->run++) {
        const int64_t *slot = slot_of(fetching->delta->op, fetching->run);
        const int64_t *module = module_of(slot, fetching->place.index);
        const char *b = panel_of_b(module, fetching->place.panel);
        int64_t size = int8_bytes_of_b(module[MODULE_RANKS], PANEL_OUTPUTS);
        for (int64_t at = 0; slot[SLOT_A] != 0 && at < size; at += LINE)
            prefetch(b, at);
    }
}

/* Add the deltas of a pass of rows to a panel of their outputs; `run` is the first that has rows
 * there. */
static void add_pass(const struct delta *delta, const struct run *run, struct span pass,
                     const struct module_panel *place, struct outputs to, bool is_first)
{
    const struct run *end = delta->step->runs + delta->step->num_runs;
    for (; run < end && run->start < pass.end; run++) {
        struct span rows = {run->start > pass.first ? run->start : pass.first,
                            smaller(run->stop, pass.end)};
        float *y = to.y + (rows.first - pass.first) * to.stride;
        struct panel_task task = panel_of_run(delta, run, place, rows.first, y, to.stride);
        if (slot_of(delta->op, run)[SLOT_A] != 0
            && (task.num_ranks > 0 || task.gain != NULL || task.shift != NULL))
            add_run_delta(delta, place, task, pass, rows, is_first || rows.first == run->start);
    }
}

/* Add to a panel of the outputs of some rows. */
static void add_delta(const struct delta *delta, struct span block, int64_t panel,
                      struct outputs to)
{
    if (delta->inner == NULL)
        return;
    struct module_panel place = module_panel(delta->op, panel);
    const struct run *run = delta->step->runs, *end = run + delta->step->num_runs;
    int64_t left = block.end - block.first, num_passes = parts(left, DELTA_PASS);
    for (struct span pass = block; num_passes > 0; num_passes--, left -= pass.end - pass.first) {
        pass.first = block.end - left;
        pass.end = pass.first + parts(left, num_passes);
        while (run < end && run->stop <= pass.first)
            run++;
        add_pass(delta, run, pass, &place, to, pass.first == block.first);
        to.y += (pass.end - pass.first) * to.stride;
    }
}

#endif
