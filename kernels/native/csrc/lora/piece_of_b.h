/* The pieces of B that tasks of lora_expand need. */
#ifndef TOPWORK_LORA_PIECE_OF_B_H
#define TOPWORK_LORA_PIECE_OF_B_H

#include "lora/panel_delta.h"

/* Some outputs of a module. */
struct piece {
    const char *b; /* of the first lora_rank and output, in int8 the first panel; NULL: no piece */
    int64_t ldb, first_rank, num_ranks, first_output, num_outputs;
};

INLINE struct piece piece_of(const struct lora *op, const struct task *task)
{
    if (task->slot == NULL)
        return (struct piece){0};
    const int64_t *module = task->slot + SLOT_FIELDS;
    const int64_t *width = op->module_widths;
    int64_t first = 0, index = task->piece, num_pieces;
    for (; index >= (num_pieces = pieces_of_module(module, *width)); first += *width++) {
        index -= num_pieces;
        module += MODULE_FIELDS;
    }
    struct span outputs = part_of(*width, num_pieces, OUTPUT_GROUP, index);
    int64_t num_ranks = module[MODULE_RANKS];
    int64_t before = op->item == INT8 ? int8_bytes_of_b(num_ranks, outputs.first)
                                      : outputs.first * item_bytes(op->item);
    return (struct piece){
        .b = element_or_null(address_in(module[MODULE_B]), before, INT8),
        .ldb = *width,
        .first_rank = module[MODULE_FIRST_RANK],
        .num_ranks = num_ranks,
        .first_output = first + outputs.first,
        .num_outputs = outputs.end - outputs.first,
    };
}

#endif
