/* How the products of a linear, or of those of many experts, are cut into tasks.
 *
 * A task is a panel of outputs for a block of rows; the panels of one expert stand behind those of
 * the one before.
 */
#ifndef TOPWORK_LINEAR_BLOCKS_H
#define TOPWORK_LINEAR_BLOCKS_H

#include "lora/linear_delta.h"
#include "runtime/thread_pool.h"
#include "simd/vector.h"

enum {
    PANEL = 32, /* outputs */
    PANEL_VECTORS = PANEL / LANES,
    TILE_VECTORS = TILE_COLUMNS / LANES, /* all of a panel in AVX-512, half of it in AVX2 */
    BLOCK_BYTES = 512 * 1024,            /* of x, which stay in a core's cache for all panels */
};

/* Some rows of x and the panel for them, which has another number among those of all experts. */
struct block {
    int64_t first_row, end_row, panel, weight_panel;
};

_Static_assert((int)PANEL == (int)PANEL_OUTPUTS, "a panel of a linear is one of B");

/* Fetch what will be added to a block. */
INLINE void fetch_block_delta(const struct delta *delta, struct block block)
{
    struct b_fetching fetching = begin_to_fetch_b(delta, block.first_row, block.panel);
    fetch_b(&fetching, block.end_row);
}

/* Add what adapters in int8 add to a block. */
INLINE void add_block_delta(const struct delta *delta, struct block block, struct outputs to)
{
    add_delta(delta, (struct span){block.first_row, block.end_row}, block.panel, to);
}

INLINE int64_t num_panels(int64_t num_outputs) { return round_up(num_outputs, PANEL) / PANEL; }

/* The rows of one linear; blocks come one after the other. */
struct rows_and_panels {
    int64_t num_rows, block_rows, num_panels;
};

INLINE int64_t num_blocks(const struct rows_and_panels *all)
{
    return round_up(all->num_rows, all->block_rows) / all->block_rows * all->num_panels;
}

INLINE struct block nth_block(const struct rows_and_panels *all, int64_t task)
{
    int64_t first = task / all->num_panels * all->block_rows, panel = task % all->num_panels;
    int64_t end = smaller(first + all->block_rows, all->num_rows);
    return (struct block){first, end, panel, panel};
}

/* What lies behind a panel, most often the next one, is fetched while rows are multiplied by it,
 * but for the first ones, which fetch the panel itself. */
struct fetching {
    uintptr_t next;
    int64_t num_lines; /* each time */
};

INLINE struct fetching fetching_behind(const char *panel, int64_t num_bytes, int64_t num_times)
{
    return (struct fetching){(uintptr_t)panel + (uintptr_t)num_bytes,
                             num_times == 0 ? 0 : num_bytes / LINE / num_times + 1};
}

INLINE void fetch_some(struct fetching *fetching)
{
    for (int64_t i = 0; i < fetching->num_lines; i++, fetching->next += LINE)
        __builtin_prefetch((const void *)fetching->next, 0, 2);
}

struct experts {
    const int64_t *starts; /* [num_experts + 1]: the rows of x of each expert */
    int64_t num_experts, block_rows, num_panels;
};

/* Where a thread stands in the experts. */
struct expert_cursor {
    int64_t expert, num_before; /* tasks of the experts before this one */
};

/* Return the panels of an expert for all blocks of its rows: none where it has no rows. */
INLINE int64_t tasks_of_expert(const struct experts *experts, int64_t expert)
{
    struct rows_and_panels own = {experts->starts[expert + 1] - experts->starts[expert],
                                  experts->block_rows, experts->num_panels};
    return num_blocks(&own);
}

INLINE int64_t tasks_of_experts(const struct experts *experts)
{
    int64_t num_tasks = 0;
    for (int64_t expert = 0; expert < experts->num_experts; expert++)
        num_tasks += tasks_of_expert(experts, expert);
    return num_tasks;
}

/* Return the block of a task; the cursor goes to its expert. */
INLINE struct block block_of_task(const struct experts *experts, struct expert_cursor *cursor,
                                  int64_t task)
{
    int64_t num_tasks;
    if (task < cursor->num_before) /* of another thread's share */
        *cursor = (struct expert_cursor){0};
    for (; task >= cursor->num_before + (num_tasks = tasks_of_expert(experts, cursor->expert));
         cursor->expert++)
        cursor->num_before += num_tasks;
    int64_t index = task - cursor->num_before, panel = index % experts->num_panels;
    int64_t first =
        experts->starts[cursor->expert] + index / experts->num_panels * experts->block_rows;
    int64_t end = smaller(first + experts->block_rows, experts->starts[cursor->expert + 1]);
    return (struct block){first, end, panel, cursor->expert * experts->num_panels + panel};
}

#endif
