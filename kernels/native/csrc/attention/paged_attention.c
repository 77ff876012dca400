/* Causal attention over KV pages, an op for all rows of a layer.
 *
 * Owns the order in which a row is summed: blocks of 64 positions from position 0 on, a score over
 * head_dim from the first word to the last, times scale, then values from the first word of
 * positions to the last. Nothing of it depends on other rows, and a decode runs through the same
 * code as a prefill, so a row has the same bits in any chunk, batch and thread. What lies past a
 * row's own position is never a number to it. What lies before its window is either in a block that
 * it skips or has a weight of zero, which leaves sums as they are: a window changes no bit while it
 * is not full. Blocks that no row of a task sees are not read.
 */
#include "runtime/thread_pool.h"
#include "attention/tiles.h"

enum {
    TASKS_EACH = 3, /* of a thread, that all may end at about one time */
};

/* Rows of a task that attend together: `index` counts them from 0, `row` from the task's first. */
struct tile {
    int64_t row, num_rows;
    const int64_t *values; /* bytes to rows of V where they are read as they lie; else NULL */
    int64_t visible[PRODUCT_ROWS]; /* positions of the block up to the row's own, at least one */
};

/* Tell whether V is not packed: it would be read but once, and is whole vectors of floats. */
INLINE bool reads_values(const struct attention *op, int64_t num_rows, enum form form)
{
    return !in_pairs(form) && num_rows <= PRODUCT_ROWS && op->head_dim % LANES == 0;
}

/* Return what products ask of memory, or nothing without a next block. */
INLINE struct ahead look_ahead(const void *pages, const struct block *next, int64_t num_bytes)
{
    if (next == NULL)
        return (struct ahead){0};
    return (struct ahead){pages, next->offsets, BLOCK / 2, num_bytes};
}

INLINE void score(const struct attention *op, const struct workspace *w, const struct tile *tile,
                  const struct block *next, enum form form)
{
    int64_t depth = row_depth(op, form);
    struct product product = {
        .c = w->scores,
        .a = w->queries + tile->row * depth,
        .b = w->keys,
        .ldc = BLOCK,
        .lda = depth,
        .ldb = BLOCK,
        .depth = depth,
        .scale = score_scale(op, form),
        .ahead = look_ahead(op->k_pages, next, 1),
    };
    int64_t num_vectors = (tile->visible[tile->num_rows - 1] + LANES - 1) / LANES;
    (in_pairs(form) ? scaled_product_pairs : scaled_product_floats)(tile->num_rows, num_vectors,
                                                                    &product);
}

/* Add words [first, stop) of the block's values to the sums of `num_rows` rows from `index` on. */
INLINE void add_words_of_values(const struct attention *op, const struct workspace *w,
                                const struct tile *tile, int64_t index, int64_t num_rows,
                                int64_t first, int64_t stop, const struct block *next,
                                enum form form)
{
    int64_t width = row_width(op);
    struct product product = {
        .c = w->sums + (tile->row + index) * width,
        .a = w->weights + index * BLOCK + first,
        .b = w->values + first * width,
        .ldc = width,
        .lda = BLOCK,
        .ldb = width,
        .depth = stop - first,
        .ahead = look_ahead(op->v_pages, next, tile->values == NULL ? 1 : row_words(op) * 4),
    };
    if (first >= stop)
        return;
    if (in_pairs(form)) {
        add_product_pairs(num_rows, width / LANES, &product);
    } else if (tile->values == NULL) {
        add_product_floats(num_rows, width / LANES, &product);
    } else {
        product.rows = op->v_pages;
        product.offsets = tile->values + first;
        (is_bf16(form) ? add_product_of_bf16_rows
                       : add_product_of_f32_rows)(num_rows, width / LANES, &product);
    }
}

/* Add the values of a pair whose second position is hidden from a row: it may be NaN. */
INLINE void add_half(const struct attention *op, const struct workspace *w, const struct tile *tile,
                     int64_t index)
{
    int64_t width = row_width(op), word = tile->visible[index] / 2;
    for (int64_t d = 0; d < width; d += LANES)
        store_words(w->half + d, load_words(w->values + word * width + d) & 0xffff);
    struct product product = {
        .c = w->sums + (tile->row + index) * width,
        .a = w->weights + index * BLOCK + word,
        .b = w->half,
        .depth = 1,
    };
    add_product_pairs(1, width / LANES, &product);
}

/* Attend to the packed block, which begins at position `start`. */
INLINE void attend_tile(const struct attention *op, const struct workspace *w, struct tile tile,
                        int64_t start, const struct block *next, enum form form)
{
    int64_t row = tile.row, num_rows = tile.num_rows, step = in_pairs(form) ? 2 : 1;
    for (int64_t i = 0; i < num_rows; i++)
        tile.visible[i] = num_visible(w, row + i, start);
    score(op, w, &tile, next, form);
    for (int64_t i = 0; i < num_rows; i++)
        soften_row(op, w, w->scores + i * BLOCK, w->weights + i * BLOCK, row + i, start, form);
    int64_t shared = tile.visible[0] / step;
    add_words_of_values(op, w, &tile, 0, num_rows, 0, shared, next, form);
    for (int64_t i = 0; i < num_rows; i++) {
        int64_t stop = tile.visible[i] / step;
        add_words_of_values(op, w, &tile, i, 1, shared, stop, NULL, form);
        if (tile.visible[i] % step != 0)
            add_half(op, w, &tile, i);
    }
}

/* Return how many rows of the task, from its first on, see a position of the block or one behind.
 */
INLINE int64_t rows_that_see(const struct attention *op, const struct task *task, int64_t start)
{
    int64_t tokens = start + BLOCK - 1 + op->window - task->first_position;
    if (op->window == 0 || tokens > task->num_tokens)
        tokens = task->num_tokens;
    return tokens * group_size(op);
}

/* `after` is the block that this thread is likely to need behind the task's. */
INLINE void attend(const struct attention *op, const struct task *task, const struct block *after,
                   const struct workspace *w, enum form form, bool is_int8)
{
    struct attention of_widened = *op;
    of_widened.k_pages = w->widened_keys;
    of_widened.v_pages = w->widened_values;
    const struct attention *read = is_int8 ? &of_widened : op; /* where rows are as products want */
    struct block widened;
    int64_t group = group_size(op), num_rows = task->num_tokens * group;
    int64_t num_positions = positions_of(task);
    struct block blocks[2], *block = &blocks[0], *next = &blocks[1];
    int64_t first = first_block(op, task);
    begin(op, task, w, form);
    find_block(op, task, first, num_positions, block);
    for (int64_t start = first; start < num_positions; start += BLOCK) {
        if (start + BLOCK < num_positions)
            find_block(op, task, start + BLOCK, num_positions, next);
        else
            *next = *after;
        if (is_int8)
            widen_block(op, block, next, w->widened_keys, w->widened_values, form, &widened);
        const struct block *rows = is_int8 ? &widened : block, *later = is_int8 ? rows : next;
        pack_keys(read, rows, later, w->keys, form);
        struct tile tile = {0};
        if (reads_values(op, num_rows, form))
            tile.values = rows->offsets;
        else
            pack_values(read, rows, later, w->values, form);
        int64_t hidden = start - task->first_position; /* tokens before the block */
        int64_t stop = rows_that_see(op, task, start);
        tile.row = hidden > 0 ? hidden * group : 0;
        if (form == OF_TILES)
            attend_in_tiles(op, w, tile.row, stop, start, block->count);
        for (; form != OF_TILES && tile.row < stop; tile.row += PRODUCT_ROWS) {
            tile.num_rows = smaller(PRODUCT_ROWS, stop - tile.row);
            attend_tile(read, w, tile, start, tile.row == 0 && !is_int8 ? next : NULL, form);
        }
        struct block *done = block;
        block = next;
        next = done;
    }
    finish(op, task, w);
}

#define DEFINE_ATTEND(name, form, is_int8)                                 \
    static void name(const struct attention *op, const struct task *task,  \
                     const struct block *after, const struct workspace *w) \
    {                                                                      \
        attend(op, task, after, w, form, is_int8);                         \
    }
DEFINE_ATTEND(attend_floats, OF_FLOATS, false)
DEFINE_ATTEND(attend_floats_over_int8, OF_FLOATS, true)
#if HAS_DOTS
DEFINE_ATTEND(attend_pairs, OF_PAIRS, false)
DEFINE_ATTEND(attend_pairs_over_int8, OF_PAIRS, true)
#else
DEFINE_ATTEND(attend_widened, OF_WIDENED, false)
DEFINE_ATTEND(attend_widened_over_int8, OF_WIDENED, true)
#endif
#if HAS_TILES
DEFINE_ATTEND(attend_tiles, OF_TILES, false)
DEFINE_ATTEND(attend_tiles_over_int8, OF_TILES, true)
#endif

typedef void (*attend_function)(const struct attention *, const struct task *, const struct block *,
                                const struct workspace *);

static attend_function attend_of(const struct attention *op)
{
    switch (form_of(op)) {
    case OF_FLOATS: return op->is_int8 ? attend_floats_over_int8 : attend_floats;
#if HAS_DOTS
    case OF_PAIRS: return op->is_int8 ? attend_pairs_over_int8 : attend_pairs;
#else
    case OF_WIDENED: return op->is_int8 ? attend_widened_over_int8 : attend_widened;
#endif
#if HAS_TILES
    case OF_TILES: return op->is_int8 ? attend_tiles_over_int8 : attend_tiles;
#endif
    default: __builtin_unreachable();
    }
}

/* Return the runs of up to so many tokens into which a sequence's rows are cut. */
INLINE int64_t num_runs(int64_t num_rows, int64_t num_tokens)
{
    return (num_rows + num_tokens - 1) / num_tokens;
}

/* Tasks are counted over sequences, then runs from the last, then KV heads. */
static int64_t num_tasks(const struct attention *op, const struct step *step, int64_t num_tokens)
{
    int64_t num_tasks = 0;
    for (int64_t sequence = 0; sequence < step->num_sequences; sequence++)
        num_tasks += num_runs(step->sequences[sequence * 3 + 1], num_tokens) * op->num_kv_heads;
    return num_tasks;
}

/* Return the tokens of a run in this step. */
static int64_t run_tokens(const struct attention *op, const struct worker *worker)
{
    int64_t most = task_tokens(op, MOST_TASK_ROWS);
    bool is_shared_out = num_tasks(op, worker->step, most) >= worker->num_threads * TASKS_EACH;
    return is_shared_out ? most : task_tokens(op, FEW_TASK_ROWS);
}

static void find_task(const struct attention *op, const struct step *step, int64_t num_tokens,
                      int64_t index, struct task *task)
{
    const int64_t *row = step->sequences;
    int64_t runs;
    for (; index >= (runs = num_runs(row[1], num_tokens)) * op->num_kv_heads; row += 3)
        index -= runs * op->num_kv_heads;
    int64_t run = runs - 1 - index / op->num_kv_heads;
    int64_t offset = row[1] * run / runs, stop = row[1] * (run + 1) / runs;
    *task = (struct task){
        .pages = step->page_table + (row - step->sequences) / 3 * step->max_pages,
        .first_token = row[0] + offset,
        .num_tokens = stop - offset,
        .first_position = row[2] - row[1] + offset,
        .kv_head = index % op->num_kv_heads,
    };
}

int64_t topwork_paged_attention_scratch(const void *op)
{
    struct workspace w;
    return cut_scratch(op, NULL, &w);
}

void topwork_paged_attention(const void *pointer, struct worker *worker)
{
    const struct attention *op = pointer;
    struct workspace w;
    struct task task, later;
    struct block after;
    struct tile_rows told = {0};
    attend_function run = attend_of(op);
    cut_scratch(op, worker->scratch, &w);
    w.told = &told;
    int64_t num_tokens = run_tokens(op, worker);
    int64_t count = num_tasks(op, worker->step, num_tokens), found = -1; /* the index of `later` */
    for (int64_t index; (index = take_task(worker, count)) >= 0;) {
        if (index == found)
            task = later;
        else
            find_task(op, worker->step, num_tokens, index, &task);
        found = smaller(index + 1, count - 1);
        find_task(op, worker->step, num_tokens, found, &later);
        find_block(op, &later, first_block(op, &later), positions_of(&later), &after);
        run(op, &task, &after, &w);
    }
    if (form_of(op) == OF_TILES)
        release_tiles();
}
