/* The second half of a low-rank delta: gain y + shift + B u, where u is the A x of lora_shrink.
 *
 * Owns the order in which an element is summed: from 0 over the lora_ranks, then added to the rest.
 */
#include "delta.h"

enum {
    TILE_VECTORS = 4,    /* of outputs, whose products share their loads */
    WIDE_VECTORS = 8,    /* of outputs in a tile of few rows: longer pieces of B's lines */
    FEW_ROWS = TILE / 2, /* whose sums of so many outputs still stay in registers */
    AHEAD = 2,           /* tiles of B that are fetched before their use */
};

/* Return the outputs that a piece of a module's B has. */
INLINE int64_t outputs_of_piece(const struct module *module)
{
    int64_t outputs = TASK_ITEMS / (module->num_ranks > 0 ? module->num_ranks : 1);
    return round_up(outputs, TILE_VECTORS * LANES);
}

static int64_t pieces_of_b(const struct lora *op, const struct line *line, int64_t num_rows)
{
    int64_t num_pieces = 0;
    (void)num_rows;
    for (int64_t i = 0; i < op->num_modules; i++)
        num_pieces += parts(op->module_widths[i], outputs_of_piece(&line->modules[i]));
    return num_pieces;
}

/* Some rows and neighbouring outputs of one module. */
struct tile {
    float *y;                  /* of the first row and output */
    const float *gain, *shift; /* of the first output, or NULL */
    const float *u;            /* of the first row and lora_rank */
    const void *b;             /* of the first output */
    int64_t ldy, ldu, ldb, num_ranks;
};

INLINE f32v load_or(const float *from, int64_t first, float otherwise)
{
    return from == NULL ? splat(otherwise) : load_f32(from + first);
}

INLINE void expand_tile(int num_rows, int num_vectors, const struct tile *t, bool is_bf16)
{
    f32v sums[TILE][WIDE_VECTORS];
    for (int i = 0; i < num_rows; i++)
        for (int j = 0; j < num_vectors; j++)
            sums[i][j] = (f32v){0};
    for (int64_t rank = 0; rank < t->num_ranks; rank++) {
        f32v factors[TILE];
        const void *b = element(t->b, rank * t->ldb, is_bf16);
        for (int i = 0; i < num_rows; i++)
            factors[i] = splat(t->u[i * t->ldu + rank]);
        for (int j = 0; j < num_vectors; j++) {
            f32v x = load_whole(element(b, j * LANES, is_bf16), is_bf16);
            if (!is_bf16 || j % 2 == 0) /* else in the same line as the last */
                __builtin_prefetch(element(b, (j + AHEAD * num_vectors) * LANES, is_bf16));
            for (int i = 0; i < num_rows; i++)
                sums[i][j] = multiply_add(factors[i], x, sums[i][j]);
        }
    }
    bool is_scaled = t->gain != NULL || t->shift != NULL;
    for (int i = 0; i < num_rows; i++)
        for (int j = 0; j < num_vectors; j++) {
            f32v y = load_f32(t->y + i * t->ldy + j * LANES);
            if (is_scaled)
                y = multiply_add(y, load_or(t->gain, j * LANES, 1),
                                 load_or(t->shift, j * LANES, 0));
            sums[i][j] = t->num_ranks > 0 ? y + sums[i][j] : y;
        }
    /* Only now: a store holds up loads of rows whose addresses end alike. */
    for (int i = 0; i < num_rows; i++)
        for (int j = 0; j < num_vectors; j++)
            store_f32(t->y + i * t->ldy + j * LANES, sums[i][j]);
}

INLINE void expand_vectors(int num_rows, int64_t num_vectors, const struct tile *t,
                           bool is_bf16)
{
    switch (num_vectors) {
    case 1: expand_tile(num_rows, 1, t, is_bf16); break;
    case 2: expand_tile(num_rows, 2, t, is_bf16); break;
    case 3: expand_tile(num_rows, 3, t, is_bf16); break;
    case 4: expand_tile(num_rows, 4, t, is_bf16); break;
    case WIDE_VECTORS:
        if (num_rows <= FEW_ROWS)
            expand_tile(num_rows, WIDE_VECTORS, t, is_bf16);
        break;
    }
}

INLINE void expand_rows(int64_t num_rows, int64_t num_vectors, const struct tile *t,
                        bool is_bf16)
{
    switch (num_rows) {
    case 1: expand_vectors(1, num_vectors, t, is_bf16); break;
    case 2: expand_vectors(2, num_vectors, t, is_bf16); break;
    case 3: expand_vectors(3, num_vectors, t, is_bf16); break;
#if LANES == 16
    case 4: expand_vectors(4, num_vectors, t, is_bf16); break;
    case 5: expand_vectors(5, num_vectors, t, is_bf16); break;
    case 6: expand_vectors(6, num_vectors, t, is_bf16); break;
#endif
    }
}

static void expand_f32(int64_t num_rows, int64_t num_vectors, const struct tile *t)
{
    expand_rows(num_rows, num_vectors, t, false);
}

static void expand_bf16(int64_t num_rows, int64_t num_vectors, const struct tile *t)
{
    expand_rows(num_rows, num_vectors, t, true);
}

/* The last outputs of a module where they fill no vector: as a tile of float32, with zeros
 * after them. */
struct edge {
    float y[TILE * LANES], gain[LANES], shift[LANES];
    float b[]; /* [lora_ranks, LANES] */
};

INLINE const float *pad(float *to, const void *from, int64_t count, bool is_bf16)
{
    if (from == NULL)
        return NULL;
    store_f32(to, load_some(from, 0, count, is_bf16));
    return to;
}

static void expand_edge(int64_t num_rows, int64_t count, struct tile tile, struct edge *edge)
{
    float *y = tile.y;
    int64_t ldy = tile.ldy;
    for (int64_t i = 0; i < num_rows; i++)
        pad(edge->y + i * LANES, y + i * ldy, count, false);
    tile.gain = pad(edge->gain, tile.gain, count, false);
    tile.shift = pad(edge->shift, tile.shift, count, false);
    tile.y = edge->y;
    tile.b = edge->b;
    tile.ldy = tile.ldb = LANES;
    expand_f32(num_rows, 1, &tile);
    for (int64_t i = 0; i < num_rows; i++)
        memcpy(y + i * ldy, edge->y + i * LANES, (size_t)count * sizeof(float));
}

static void go_right(struct tile *tile, int64_t num_outputs, bool is_bf16)
{
    tile->y += num_outputs;
    tile->b = element(tile->b, num_outputs, is_bf16);
    if (tile->gain != NULL)
        tile->gain += num_outputs;
    if (tile->shift != NULL)
        tile->shift += num_outputs;
}

/* Do `count` outputs, of which `tile` has the first in the task's first row. */
static void expand(const struct task *task, struct tile tile, int64_t count, bool is_bf16,
                   struct edge *edge)
{
    int64_t cut = count % LANES, whole = count - cut;
    for (int64_t rank = 0; cut > 0 && rank < tile.num_ranks; rank++)
        pad(edge->b + rank * LANES, element(tile.b, rank * tile.ldb + whole, is_bf16), cut,
            is_bf16);
    for (int64_t row = 0; row < task->num_rows; row += TILE) {
        int64_t num_rows = smaller(TILE, task->num_rows - row);
        struct tile here = tile;
        here.y += row * tile.ldy;
        here.u += row * tile.ldu;
        for (int64_t at = 0, num_vectors; at < whole; at += num_vectors * LANES) {
            num_vectors = (whole - at) / LANES;
            bool is_wide = num_rows <= FEW_ROWS && num_vectors >= WIDE_VECTORS;
            num_vectors = is_wide ? WIDE_VECTORS : smaller(TILE_VECTORS, num_vectors);
            (is_bf16 ? expand_bf16 : expand_f32)(num_rows, num_vectors, &here);
            go_right(&here, num_vectors * LANES, is_bf16);
        }
        if (cut > 0)
            expand_edge(num_rows, cut, here, edge);
    }
}

int64_t topwork_lora_expand_scratch(const struct lora *op)
{
    return (int64_t)sizeof(struct edge) + op->inner_stride * LANES * (int64_t)sizeof(float);
}

void topwork_lora_expand(const struct lora *op, struct worker *worker)
{
    struct cursor cursor = first_run(op, worker->step, pieces_of_b);
    struct task task;
    while (next_task(op, worker, &cursor, pieces_of_b, &task)) {
        const struct line *line = task.line;
        const struct module *module = line->modules;
        const int64_t *width = op->module_widths;
        int64_t output = 0, piece = task.piece, size;
        for (; piece >= parts(*width, outputs_of_piece(module)); output += *width++)
            piece -= parts(*width, outputs_of_piece(module++));
        if (module->num_ranks == 0 && line->gain == NULL && line->shift == NULL)
            continue;
        size = outputs_of_piece(module);
        int64_t first = output + piece * size;
        struct tile tile = {
            .y = op->y + task.first_row * op->y_stride + first,
            .gain = line->gain == NULL ? NULL : line->gain + first,
            .shift = line->shift == NULL ? NULL : line->shift + first,
            .u = op->inner + task.first_row * op->inner_stride + module->first_rank,
            .b = element(module->b, piece * size, op->is_lora_bf16),
            .ldy = op->y_stride,
            .ldu = op->inner_stride,
            .ldb = *width,
            .num_ranks = module->num_ranks,
        };
        expand(&task, tile, smaller(size, *width - piece * size), op->is_lora_bf16,
               worker->scratch);
    }
}
