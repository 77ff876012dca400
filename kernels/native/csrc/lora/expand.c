/* The second half of a low-rank delta: gain y + shift + B u, where u is the A x of lora_shrink.
 *
 * In float32 and bfloat16 B is read for few rows as it lies, some lora_ranks after the others, for
 * more rows in columns whose sums stay in registers.
 */
#include "lora/expand_int8.h"
#include "lora/expand_tile.h"

enum {
    FEW_ROWS = 8,   /* so few that reading B is the work */
    FEW_RANKS = 16, /* of B that are read for them side by side, while the next are fetched */
};

/* Do some lora_ranks after the others, so that B is read in the order in which it lies. */
static void expand_in_turn(int64_t num_rows, struct tile *t, const struct piece *piece,
                           const struct piece *next, enum item item)
{
    const float *u = t->u;
    int64_t rank = 0;
    do {
        t->b = element_or_null(piece->b, rank * piece->ldb, item);
        t->u = u + rank;
        t->num_ranks = smaller(piece->num_ranks - rank, FEW_RANKS);
        t->is_first = rank == 0;
        rank += FEW_RANKS;
        t->is_last = rank >= piece->num_ranks;
        t->ahead = t->is_last ? next->b : element(piece->b, rank * piece->ldb, item);
        t->ld_ahead = t->is_last ? next->ldb : piece->ldb;
        expand_items(num_rows, t, item);
    } while (rank < piece->num_ranks);
}

/* The last outputs of a module where they fill no vector: as a tile of float32, with zeros
 * after them. */
struct edge {
    float y[TILE * LANES], gain[LANES], shift[LANES];
    float b[]; /* [lora_ranks, LANES] */
};

INLINE const float *pad(float *to, const void *from, int64_t count, enum item item)
{
    if (from == NULL)
        return NULL;
    store_f32(to, load_some(from, 0, count, item == BF16));
    return to;
}

/* Do the last `count` outputs of a task's rows, from output `first` of the piece on. */
static void expand_edge(const struct lora *op, const struct task *task, const struct piece *piece,
                        int64_t first, int64_t count, struct edge *edge)
{
    int64_t output = piece->first_output + first, ldy = op->y_stride;
    const float *gain = address_in(task->slot[SLOT_GAIN]);
    const float *shift = address_in(task->slot[SLOT_SHIFT]);
    for (int64_t rank = 0; rank < piece->num_ranks; rank++)
        pad(edge->b + rank * LANES, element(piece->b, rank * piece->ldb + first, op->item), count,
            op->item);
    struct tile tile = {
        .y = edge->y,
        .gain = gain == NULL ? NULL : pad(edge->gain, gain + output, count, F32),
        .shift = shift == NULL ? NULL : pad(edge->shift, shift + output, count, F32),
        .b = edge->b,
        .ldy = LANES,
        .ldu = op->inner_stride,
        .ldb = LANES,
        .num_ranks = piece->num_ranks,
        .num_outputs = LANES,
        .is_first = true,
        .is_last = true,
    };
    int64_t end = task->first_row + task->num_rows;
    for (int64_t row = task->first_row, num_rows; row < end; row += num_rows) {
        num_rows = smaller(TILE, end - row);
        float *y = op->y + row * ldy + output;
        for (int64_t i = 0; i < num_rows; i++)
            pad(edge->y + i * LANES, y + i * ldy, count, F32);
        tile.u = op->inner + row * op->inner_stride + piece->first_rank;
        expand_f32(num_rows, &tile);
        for (int64_t i = 0; i < num_rows; i++)
            memcpy(y + i * ldy, edge->y + i * LANES, (size_t)count * sizeof(float));
    }
}

/* Do the first `num_outputs` outputs of a task, whole vectors. */
static void expand(const struct lora *op, const struct task *task, const struct piece *piece,
                   const struct piece *next, int64_t num_outputs, float *sums)
{
    const float *gain = address_in(task->slot[SLOT_GAIN]);
    const float *shift = address_in(task->slot[SLOT_SHIFT]);
    struct tile tile = {
        .gain = gain == NULL ? NULL : gain + piece->first_output,
        .shift = shift == NULL ? NULL : shift + piece->first_output,
        .b = piece->b,
        .sums = sums,
        .ldy = op->y_stride,
        .ldu = op->inner_stride,
        .ldb = piece->ldb,
        .ld_ahead = next->ldb,
        .num_ranks = piece->num_ranks,
        .num_outputs = num_outputs,
        .is_first = true,
        .is_last = true,
    };
    int64_t num_tiles = parts(task->num_rows, TILE), row = task->first_row;
    for (int64_t end = row + task->num_rows, num_rows; row < end; row += num_rows, num_tiles--) {
        num_rows = parts(end - row, num_tiles);
        tile.y = op->y + row * tile.ldy + piece->first_output;
        tile.u = op->inner + row * tile.ldu + piece->first_rank;
        if (task->num_rows <= FEW_ROWS) {
            expand_in_turn(num_rows, &tile, piece, next, op->item);
            continue;
        }
        tile.ahead = num_tiles == 1 ? next->b : NULL;
        expand_items(num_rows, &tile, op->item);
    }
}

void fetch_share_of_b(const struct lora *op, const struct worker *worker)
{
    struct task task = first_task(op, worker, pieces_of_b);
    struct piece piece = piece_of(op, &task);
    if (op->item == INT8) {
        fetch_panels(&piece);
        return;
    }
    for (int64_t rank = 0; rank < smaller(piece.num_ranks, FEW_RANKS); rank++) {
        const char *row = element(piece.b, rank * piece.ldb, op->item);
        for (int64_t at = 0; at < piece.num_outputs * item_bytes(op->item); at += LINE)
            prefetch(row, at);
    }
}

/* Return the bytes of an edge, which stands in front of the sums in a thread's scratch memory. */
INLINE int64_t edge_bytes(const struct lora *op)
{
    return (int64_t)sizeof(struct edge)
           + round_up(op->inner_stride, LINE) * LANES * (int64_t)sizeof(float);
}

int64_t topwork_lora_expand_scratch(const void *pointer)
{
    const struct lora *op = pointer;
    if (op->item == INT8)
        return int8_expand_scratch(op);
    int64_t widest = 0;
    for (int64_t i = 0; i < op->num_modules; i++)
        widest = widest > op->module_widths[i] ? widest : op->module_widths[i];
    return edge_bytes(op) + FEW_ROWS * widest * (int64_t)sizeof(float);
}

/* Do a task: whole vectors of outputs, then the rest. */
static void expand_all(const struct lora *op, const struct task *task, const struct piece *piece,
                       const struct piece *next, char *scratch)
{
    int64_t cut = piece->num_outputs % LANES, num_outputs = piece->num_outputs - cut;
    expand(op, task, piece, next, num_outputs, (float *)(scratch + edge_bytes(op)));
    if (cut > 0)
        expand_edge(op, task, piece, num_outputs, cut, (struct edge *)scratch);
}

void topwork_lora_expand(const void *pointer, struct worker *worker)
{
    const struct lora *op = pointer;
    struct cursor cursor = first_run(op, worker->step, pieces_of_b);
    struct task task, following;
    while (next_task(op, worker, &cursor, pieces_of_b, &task, &following)) {
        struct piece piece = piece_of(op, &task), next = piece_of(op, &following);
        if (piece.num_ranks == 0 && task.slot[SLOT_GAIN] == 0 && task.slot[SLOT_SHIFT] == 0)
            continue;
        if (next.b == piece.b)
            next.b = NULL; /* for other rows, and here already */
        if (op->item == INT8)
            expand_int8(op, &task, &piece, &next, worker->scratch);
        else
            expand_all(op, &task, &piece, &next, worker->scratch);
    }
}
