/* The first half of a low-rank delta: A x of each row whose slot has a LoRA.
 *
 * The order in which an element is summed: LANES sums, one for each input modulo LANES, added
 * from the first to the last, then folded. Where x and A are bfloat16, one for each pair of inputs
 * modulo LANES, by the CPU's own instruction where it has one, else the second of them first.
 */
#include "lora/shrink_rows.h"

enum {
    TILE = LANES == 16 ? 6 : 3, /* rows whose sums stay in registers */
    AHEAD_BYTES = 8192,         /* of A that are fetched before their use, at least */
};

/* Lines of A that are fetched meanwhile: of each RANK_GROUP one in `mask` + 1, which has the number
 * `phase`. */
struct ahead {
    uintptr_t from; /* 0: none */
    int mask, phase;
};

/* Some rows times some of A's. */
struct dots {
    const char *x;       /* [rows, x_size]: vectors, no input behind the last or zeros */
    const void *a;       /* [lora_ranks, num_inputs] */
    float *u;            /* of the first row and lora_rank */
    const float *scales; /* of the first lora_rank; of int8 */
    int64_t x_size, num_inputs, ldu;
    struct ahead ahead;
};

/* Add the products of one vector of inputs, from input k on. */
INLINE void add_vector(int num_rows, int num_ranks, const struct dots *d, int64_t k, int64_t count,
                       enum form form, f32v sums[TILE][RANK_GROUP])
{
    const char *x = d->x + k / inputs_of_vector(form) * vector_bytes(form);
    int64_t size = item_bytes(item_of_form(form)), ahead = k * num_ranks * size;
    for (int j = 0; j < num_ranks; j++) {
        int64_t at = j * d->num_inputs + k;
        f32v a = load_inputs(d->a, at, count, item_of_form(form), form == PAIRS);
        if (d->ahead.from != 0 && (j & d->ahead.mask) == d->ahead.phase)
            prefetch((const void *)d->ahead.from, ahead + j * inputs_of_vector(form) * size);
        for (int i = 0; i < num_rows; i++) {
            const char *row = x + i * d->x_size;
            u32v inputs = load_words(row);
            if (is_split(form)) {
                f32v first = load_f32(row + LANES * 4);
                sums[i][j] = multiply_add((f32v)inputs, second_floats((u32v)a), sums[i][j]);
                sums[i][j] = multiply_add(first, first_floats((u32v)a), sums[i][j]);
            } else {
                sums[i][j] = add_words(sums[i][j], inputs, (u32v)a, form == PAIRS);
            }
        }
    }
}

INLINE void dot_tile(int num_rows, int num_ranks, const struct dots *d, enum form form)
{
    f32v sums[TILE][RANK_GROUP];
    for (int i = 0; i < num_rows; i++)
        for (int j = 0; j < num_ranks; j++)
            sums[i][j] = (f32v){0};
    int64_t k = 0, size = inputs_of_vector(form);
    for (; k + size <= d->num_inputs; k += size)
        add_vector(num_rows, num_ranks, d, k, size, form, sums);
    if (k < d->num_inputs)
        add_vector(num_rows, num_ranks, d, k, d->num_inputs - k, form, sums);
    for (int i = 0; i < num_rows; i++)
        if (num_ranks == RANK_GROUP)
            sum_lanes_of_four(sums[i], d->u + i * d->ldu);
        else
            for (int j = 0; j < num_ranks; j++)
                d->u[i * d->ldu + j] = sum_lanes(sums[i][j]);
    for (int i = 0; form == CODES && i < num_rows; i++)
        for (int j = 0; j < num_ranks; j++)
            d->u[i * d->ldu + j] *= d->scales[j];
}

INLINE void dot_rows(int64_t num_rows, int num_ranks, const struct dots *d, enum form form)
{
    switch (num_rows) {
    case 1: dot_tile(1, num_ranks, d, form); break;
    case 2: dot_tile(2, num_ranks, d, form); break;
    case 3: dot_tile(3, num_ranks, d, form); break;
#if LANES == 16
    case 4: dot_tile(4, num_ranks, d, form); break;
    case 5: dot_tile(5, num_ranks, d, form); break;
    case 6: dot_tile(6, num_ranks, d, form); break;
#endif
    }
}

/* The piece of A that a task needs, and the one its thread will need next. */
struct piece {
    const char *a, *next; /* of the first lora_rank; NULL: none, or this one again */
    int64_t num_ranks, group_size;
};

/* Return what to fetch beside the lora_ranks from `rank` on.
 *
 * With a single tile of rows memory is what holds it up, so this is a little ahead of them; with
 * more it is the next piece, a share of it in each of the last tiles. */
INLINE struct ahead ahead_of(const struct piece *piece, int64_t rank, int64_t tile,
                             int64_t num_tiles)
{
    int64_t at = rank / RANK_GROUP * piece->group_size;
    int64_t size = piece->num_ranks / RANK_GROUP * piece->group_size;
    if (num_tiles == 1) {
        at += round_up(AHEAD_BYTES, piece->group_size);
        if (at < size || piece->next == NULL) /* perhaps behind A, where no pointer may lead */
            return (struct ahead){(uintptr_t)piece->a + (uintptr_t)at, 0, 0};
        return (struct ahead){(uintptr_t)piece->next + (uintptr_t)(at - size), 0, 0};
    }
    int num_shares = num_tiles < RANK_GROUP ? 2 : RANK_GROUP;
    if (piece->next == NULL || tile < num_tiles - num_shares)
        return (struct ahead){0};
    return (struct ahead){(uintptr_t)piece->next + (uintptr_t)at, num_shares - 1,
                          (int)(tile & (num_shares - 1))};
}

INLINE void dot_ranks(int64_t num_rows, struct dots d, const struct piece *piece, int64_t tile,
                      int64_t num_tiles, enum form form)
{
    int64_t rank = 0;
    for (; rank + RANK_GROUP <= piece->num_ranks; rank += RANK_GROUP) {
        d.ahead = ahead_of(piece, rank, tile, num_tiles);
        dot_rows(num_rows, RANK_GROUP, &d, form);
        d.a = element(d.a, RANK_GROUP * d.num_inputs, item_of_form(form));
        d.u += RANK_GROUP;
        if (form == CODES)
            d.scales += RANK_GROUP;
    }
    for (d.ahead.from = 0; rank < piece->num_ranks; rank++) {
        dot_rows(num_rows, 1, &d, form);
        d.a = element(d.a, d.num_inputs, item_of_form(form));
        d.u++;
        if (form == CODES)
            d.scales++;
    }
}

#define DEFINE_DOT(name, form)                                                          \
    static void name(int64_t num_rows, const struct dots *d, const struct piece *piece, \
                     int64_t tile, int64_t num_tiles)                                   \
    {                                                                                   \
        dot_ranks(num_rows, *d, piece, tile, num_tiles, form);                          \
    }
DEFINE_DOT(dot_floats, FLOATS)
DEFINE_DOT(dot_widened, WIDENED)
DEFINE_DOT(dot_codes, CODES)
DEFINE_DOT(dot_pairs, PAIRS)

static void shrink(const struct lora *op, const struct task *task, int64_t first_rank,
                   const struct piece *piece, char *scratch)
{
    enum form form = form_of(op);
    int64_t num_tiles = parts(task->num_rows, TILE), row = task->first_row;
    struct dots dots = {
        .a = piece->a,
        .scales = element_or_null(address_in(task->slot[SLOT_SCALES]), first_rank, F32),
        .num_inputs = op->num_inputs,
        .ldu = op->inner_stride,
    };
    for (int64_t tile = 0, num_rows; tile < num_tiles; tile++, row += num_rows) {
        num_rows = parts(task->first_row + task->num_rows - row, num_tiles - tile);
        dots.u = op->inner + row * op->inner_stride + first_rank;
        dots.x = element(op->x, row * op->x_stride, item_of(op->is_bf16));
        dots.x_size = op->x_stride * (op->is_bf16 ? 2 : 4);
        if (!is_ready(op)) {
            dots.x = scratch;
            dots.x_size = scratch_row(op);
            for (int64_t i = 0; i < num_rows; i++)
                copy_row(op, row + i, scratch + i * dots.x_size);
        }
        switch (form) {
        case FLOATS: dot_floats(num_rows, &dots, piece, tile, num_tiles); break;
        case WIDENED: dot_widened(num_rows, &dots, piece, tile, num_tiles); break;
        case CODES: dot_codes(num_rows, &dots, piece, tile, num_tiles); break;
        case PAIRS: dot_pairs(num_rows, &dots, piece, tile, num_tiles); break;
        }
    }
}

static struct span ranks_of(const struct lora *op, const struct task *task)
{
    return part_of(task->slot[SLOT_RANKS], pieces_of_a(op, task->slot), RANK_GROUP, task->piece);
}

INLINE const void *a_of(const struct lora *op, const struct task *task, int64_t rank)
{
    return element(address_in(task->slot[SLOT_A]), rank * op->num_inputs, op->item);
}

int64_t topwork_lora_shrink_scratch(const void *pointer)
{
    const struct lora *op = pointer;
    return is_ready(op) ? 0 : TILE * scratch_row(op);
}

void topwork_lora_shrink(const void *pointer, struct worker *worker)
{
    const struct lora *op = pointer;
    struct cursor cursor = first_run(op, worker->step, pieces_of_a);
    struct task task, next;
    while (next_task(op, worker, &cursor, pieces_of_a, &task, &next)) {
        struct span ranks = ranks_of(op, &task);
        struct piece piece = {
            .a = a_of(op, &task, ranks.first),
            .num_ranks = ranks.end - ranks.first,
            .group_size = RANK_GROUP * op->num_inputs * item_bytes(op->item),
        };
        if (next.slot != NULL)
            piece.next = a_of(op, &next, ranks_of(op, &next).first);
        if (piece.next == piece.a)
            piece.next = NULL; /* for other rows, and here already */
        shrink(op, &task, ranks.first, &piece, worker->scratch);
    }
    fetch_share_of_b(op, worker); /* while the others finish */
}
