/* Rows of int8 times panels of A in int8.
 *
 * A panel is 16 lora_ranks, the last one those that are left, read four inputs at a time; zeros
 * stand behind the last input. A's rows have been rotated as the rows of x are
 * (linear/quantized_rows.h). An element of A x is float(sum of the products of codes) * the row's
 * scale * the lora_rank's, each rounded by itself: the same bits on all machines.
 */
#ifndef TOPWORK_LORA_RANK_PANEL_H
#define TOPWORK_LORA_RANK_PANEL_H

#include "linear/quantized_rows.h"
#include "lora/piece_of_a.h"

enum {
    RANK_VECTORS = RANK_PANEL / LANES,
    RANK_ROWS = LANES == 16 ? 6 : 2, /* whose sums stay in registers */
    PANELS_OF_PAIR = 2,              /* that tiles of AMX take at once */
    PAIR_RANKS = PANELS_OF_PAIR * RANK_PANEL,
    PART_QUADS = PART_INPUTS / QUAD, /* of a panel that lines of x are multiplied by at once */
    PARTS_AHEAD = 4,                 /* that are fetched before their use */
};

/* Two panels that lie one behind the other, or the last one of a piece. */
struct panel_pair {
    const char *a; /* NULL: none */
    int64_t num_ranks;
};

/* Some rows times a pair of panels. */
struct pair_task {
    const char *x; /* [rows, the form's] */
    struct coded_form form;
    struct panel_pair pair, next;
    const char *end_of_a;
    const float *scales; /* of the first lora_rank */
    float *u;            /* of the first row and lora_rank */
    int64_t num_rows, num_inputs, ldu;
    bool are_fetched; /* the pair and the next one, while it is multiplied */
};

/* Return the lora_ranks of a panel of a pair. */
INLINE int64_t ranks_of_panel(struct panel_pair pair, int panel)
{
    int64_t left = pair.num_ranks - panel * RANK_PANEL;
    return smaller(left > 0 ? left : 0, RANK_PANEL);
}

INLINE const char *panel_of_pair(struct panel_pair pair, int panel, int64_t num_inputs)
{
    return pair.a + panel * int8_bytes_of_a(RANK_PANEL, num_inputs);
}

/* Return the pair of panels of a piece that begins with a lora_rank. */
INLINE struct panel_pair pair_at(const char *a, int64_t num_ranks, int64_t rank, int64_t num_inputs)
{
    if (a == NULL)
        return (struct panel_pair){0};
    return (struct panel_pair){a + int8_bytes_of_a(rank, num_inputs),
                               smaller(num_ranks - rank, PAIR_RANKS)};
}

/* Fetch what will be multiplied some parts after this one. */
INLINE void fetch_part(const struct pair_task *t, int64_t part)
{
    int64_t num_parts = parts(t->num_inputs, PART_INPUTS);
    part += PARTS_AHEAD;
    struct panel_pair pair = part < num_parts ? t->pair : t->next;
    part -= part < num_parts ? 0 : num_parts;
    for (int panel = 0; panel < PANELS_OF_PAIR; panel++) {
        int64_t size = PART_QUADS * QUAD * ranks_of_panel(pair, panel);
        if (pair.a == NULL || size == 0)
            return;
        const char *from = panel_of_pair(pair, panel, t->num_inputs);
        for (int64_t at = 0; at < size; at += LINE)
            prefetch(from, part * size + at);
    }
}

/* Store what sums of a row stand for. */
INLINE void store_inner(const struct pair_task *t, int64_t row, int64_t first_rank, i32v sums)
{
    float scale; /* the first of a scaled_row */
    memcpy(&scale, t->x + row * t->form.row_bytes + t->form.code_bytes, sizeof scale);
    int64_t left = t->pair.num_ranks - first_rank;
    f32v u = as_rounded(words_to_floats(sums) * scale);
    u *= load_some(t->scales, first_rank, left, false);
    store_some(t->u + row * t->ldu, first_rank, left, false, u);
}

/* Add the products of four inputs. */
INLINE void add_rank_quad(int num_rows, const struct pair_task *t, const char *a, int64_t quad,
                          int64_t num_ranks, i32v sums[RANK_ROWS][RANK_VECTORS])
{
    const int8_t *x = (const int8_t *)t->x + quad * QUAD * INPUT_BYTES;
    u32v ranks[RANK_VECTORS];
#pragma GCC unroll 2
    for (int j = 0; j < RANK_VECTORS; j++)
        ranks[j] = load_quads(a + quad * num_ranks * QUAD, j * LANES, num_ranks);
#pragma GCC unroll 6
    for (int i = 0; i < num_rows; i++) {
        struct quad inputs = splat_quad(x + i * t->form.row_bytes);
#pragma GCC unroll 2
        for (int j = 0; j < RANK_VECTORS; j++)
            sums[i][j] = dot_quads(sums[i][j], inputs, ranks[j]);
    }
}

INLINE void multiply_rank_rows(int num_rows, const struct pair_task *t, int panel, bool is_whole)
{
    /* Two sums of each element, which do not wait for each other where a product takes long. */
    i32v even[RANK_ROWS][RANK_VECTORS], odd[RANK_ROWS][RANK_VECTORS];
    int64_t num_ranks = is_whole ? (int64_t)RANK_PANEL : ranks_of_panel(t->pair, panel);
    const char *a = panel_of_pair(t->pair, panel, t->num_inputs);
    int64_t num_quads = parts(t->num_inputs, QUAD), quad = 0;
#pragma GCC unroll 6
    for (int i = 0; i < num_rows; i++) {
        struct scaled_row row;
        memcpy(&row, t->x + i * t->form.row_bytes + t->form.code_bytes, sizeof row);
#pragma GCC unroll 2
        for (int j = 0; j < RANK_VECTORS; j++) {
            even[i][j] = dot_start(row.shift);
            odd[i][j] = (i32v){0};
        }
    }
    for (; quad + 2 <= num_quads; quad += 2) {
        if (t->are_fetched && panel == 0 && quad % PART_QUADS == 0)
            fetch_part(t, quad / PART_QUADS);
        add_rank_quad(num_rows, t, a, quad, num_ranks, even);
        add_rank_quad(num_rows, t, a, quad + 1, num_ranks, LANES == 16 ? odd : even);
    }
    if (quad < num_quads)
        add_rank_quad(num_rows, t, a, quad, num_ranks, even);
#pragma GCC unroll 6
    for (int i = 0; i < num_rows; i++)
        for (int j = 0; j < RANK_VECTORS; j++)
            if (j * LANES < num_ranks)
                store_inner(t, i, panel * RANK_PANEL + j * LANES, even[i][j] + odd[i][j]);
}

INLINE void multiply_rank_panel(int64_t num_rows, const struct pair_task *t, int panel,
                                bool is_whole)
{
    switch (num_rows) {
    case 1: multiply_rank_rows(1, t, panel, is_whole); break;
    case 2: multiply_rank_rows(2, t, panel, is_whole); break;
#if LANES == 16
    case 3: multiply_rank_rows(3, t, panel, is_whole); break;
    case 4: multiply_rank_rows(4, t, panel, is_whole); break;
    case 5: multiply_rank_rows(5, t, panel, is_whole); break;
    case 6: multiply_rank_rows(6, t, panel, is_whole); break;
#endif
    }
}

static void multiply_whole_rank_panel(int64_t num_rows, const struct pair_task *t, int panel)
{
    multiply_rank_panel(num_rows, t, panel, true);
}

static void multiply_last_rank_panel(int64_t num_rows, const struct pair_task *t, int panel)
{
    multiply_rank_panel(num_rows, t, panel, false);
}

/* Do a pair of panels, some rows at a time. */
static void multiply_pair(struct pair_task t)
{
    int64_t left = t.num_rows;
    for (int64_t num_rows; left > 0; left -= num_rows, t.are_fetched = false) {
        num_rows = parts(left, parts(left, RANK_ROWS));
        for (int panel = 0; panel < PANELS_OF_PAIR; panel++) {
            int64_t num_ranks = ranks_of_panel(t.pair, panel);
            if (num_ranks > 0)
                (num_ranks == RANK_PANEL ? multiply_whole_rank_panel
                                         : multiply_last_rank_panel)(num_rows, &t, panel);
        }
        t.x += num_rows * t.form.row_bytes;
        t.u += num_rows * t.ldu;
    }
}

#endif
