/* Rows of x as lora_shrink multiplies them by float32 or bfloat16: as they lie, or copied into
 * whole vectors. */
#ifndef TOPWORK_LORA_SHRINK_ROWS_H
#define TOPWORK_LORA_SHRINK_ROWS_H

#include "lora/lora.h"
#include "simd/words.h"

/* What a vector holds: of x and A LANES floats each, A's perhaps widened from bfloat16, or pairs of
 * bfloat16. */
enum form { FLOATS, WIDENED, PAIRS };

INLINE enum form form_of(const struct lora *op)
{
    if (op->item != BF16)
        return FLOATS;
    return op->is_bf16 ? PAIRS : WIDENED;
}

/* Return what A lies in. */
INLINE enum item item_of_form(enum form form) { return form == FLOATS ? F32 : BF16; }

INLINE int64_t inputs_of_vector(enum form form) { return form == PAIRS ? 2 * LANES : LANES; }

/* Tell whether x's pairs stand as a vector of their second floats and one of their first. */
INLINE bool is_split(enum form form) { return form == PAIRS && !HAS_DOTS; }

/* Return the bytes of x that a vector of inputs takes. */
INLINE int64_t vector_bytes(enum form form) { return LANES * (is_split(form) ? 8 : 4); }

/* Return up to a vector of inputs, of which there are `count` more; zeros behind them. */
INLINE f32v load_inputs(const void *from, int64_t first, int64_t count, enum item item,
                        bool in_pairs)
{
    if (!in_pairs)
        return load_some(from, first, count, item == BF16);
    f32v pairs = {0};
    memcpy(&pairs, element(from, first, BF16), (size_t)smaller(count, 2 * LANES) * 2);
    return pairs;
}

/* Return whether rows of x are vectors as they are. */
INLINE bool is_ready(const struct lora *op)
{
    enum form form = form_of(op);
    return op->is_bf16 == (form == PAIRS) && !is_split(form)
           && op->num_inputs % inputs_of_vector(form) == 0;
}

/* Return the bytes of a row of x in scratch memory. */
INLINE int64_t scratch_row(const struct lora *op)
{
    enum form form = form_of(op);
    return parts(op->num_inputs, inputs_of_vector(form)) * vector_bytes(form);
}

INLINE void store_inputs(char *to, f32v inputs, enum form form)
{
    if (is_split(form)) {
        store_f32(to, second_floats((u32v)inputs));
        store_f32(to + LANES * 4, first_floats((u32v)inputs));
    } else {
        store_f32(to, inputs);
    }
}

INLINE void copy_inputs(const struct lora *op, const void *x, char *to, enum form form)
{
    int64_t size = inputs_of_vector(form), num_inputs = op->num_inputs, k = 0;
    bool in_pairs = form == PAIRS;
    enum item item = item_of(op->is_bf16);
    for (; k + size <= num_inputs; k += size, to += vector_bytes(form))
        store_inputs(to, load_inputs(x, k, size, item, in_pairs), form);
    if (k < num_inputs)
        store_inputs(to, load_inputs(x, k, num_inputs - k, item, in_pairs), form);
}

static void copy_row(const struct lora *op, int64_t row, char *to)
{
    const void *x = element(op->x, row * op->x_stride, item_of(op->is_bf16));
    switch (form_of(op)) {
    case FLOATS: copy_inputs(op, x, to, FLOATS); break;
    case WIDENED: copy_inputs(op, x, to, WIDENED); break;
    case PAIRS: copy_inputs(op, x, to, PAIRS); break;
    }
}

#endif
