/* The pieces of A that tasks of lora_shrink need, and what is fetched while they are multiplied. */
#ifndef TOPWORK_LORA_PIECE_OF_A_H
#define TOPWORK_LORA_PIECE_OF_A_H

#include "lora/lora.h"

enum {
    AHEAD_BYTES = 8192, /* of A that are fetched before their use, at least */
};

/* The piece that a task needs, and the one its thread will need next. */
struct piece_of_a {
    const char *a, *next; /* of the first lora_rank; NULL: none, or this one again */
    int64_t first_rank, num_ranks, num_next, group_size;
};

/* Lines of A that are fetched meanwhile: of each RANK_GROUP one in `mask` + 1, which has the number
 * `phase`. */
struct ahead {
    uintptr_t from; /* 0: none */
    int mask, phase;
};

/* Return what to fetch beside the lora_ranks from `rank` on.
 *
 * With a single tile of rows memory is what holds it up, so this is a little ahead of them; with
 * more it is the next piece, a share of it in each of the last tiles. */
INLINE struct ahead ahead_of(const struct piece_of_a *piece, int64_t rank, int64_t tile,
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

INLINE struct span ranks_of(const struct lora *op, const struct task *task)
{
    int64_t unit = op->item == INT8 ? (int64_t)RANK_PANEL : (int64_t)RANK_GROUP;
    return part_of(task->slot[SLOT_RANKS], pieces_of_a(op, task->slot), unit, task->piece);
}

INLINE const char *a_of(const struct lora *op, const struct task *task, int64_t rank)
{
    const void *a = address_in(task->slot[SLOT_A]);
    if (op->item == INT8)
        return element(a, int8_bytes_of_a(rank, op->num_inputs), INT8);
    return element(a, rank * op->num_inputs, op->item);
}

INLINE struct piece_of_a piece_of_a(const struct lora *op, const struct task *task,
                                    const struct task *next)
{
    struct span ranks = ranks_of(op, task);
    struct piece_of_a piece = {
        .a = a_of(op, task, ranks.first),
        .first_rank = ranks.first,
        .num_ranks = ranks.end - ranks.first,
        .group_size = RANK_GROUP * op->num_inputs * item_bytes(op->item),
    };
    if (next->slot != NULL) {
        struct span behind = ranks_of(op, next);
        piece.next = a_of(op, next, behind.first);
        piece.num_next = behind.end - behind.first;
    }
    if (piece.next == piece.a)
        piece.next = NULL; /* for other rows, and here already */
    return piece;
}

#endif
