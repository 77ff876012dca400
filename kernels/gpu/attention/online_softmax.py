"""One turn of attention over pages: a tile of positions, folded into a running softmax.

The arithmetic that decode and prefill share. A hidden position changes no bit: the fused roundings
are spelled out, so that a turn that hides positions and one that does not round alike, whatever the
compiler would fuse.

Shapes: M query rows, N positions of one turn, P pages, HK heads, D head_dim, which tiles pad with
zeros to a power of two.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # scores are kept as powers of two: GPUs have exp2, not exp
_LOG2_E = tl.constexpr(LOG2_E)
_TILE_BYTES = 16 << 10


def tile_positions(page_size: int, head_dim: int, itemsize: int) -> int:
    """Return the positions of one turn: a page, or as much of one as is held without spilling.

    A tile of K and one of V lie in shared memory three times, and their addresses in registers.
    """
    padded: int = triton.next_power_of_2(head_dim)
    return min(page_size, _TILE_BYTES // (padded * itemsize))


@triton.jit
def load_tile(
    pages_ptr,
    page,
    kv_head,
    start,
    end,
    NUM_KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """Return positions [start, start + TILE) of one head as [TILE, D], zeros from `end` on.

    `start` is a multiple of TILE and lies in `page` of pages_ptr [P, HK, PAGE, D].
    """
    positions, dims = tl.arange(0, TILE), tl.arange(0, DIM_BLOCK)
    # A pool may have more than 2^31 elements, a head's part of a page has not.
    head_ptr = pages_ptr + (page.to(tl.int64) * NUM_KV_HEADS + kv_head) * (PAGE * HEAD_DIM)
    if TILE < PAGE:
        head_ptr += (start % PAGE) * HEAD_DIM
    pointers = head_ptr + positions[:, None] * HEAD_DIM + dims[None, :]
    if IS_FULL and DIM_BLOCK == HEAD_DIM:
        return tl.load(pointers)
    # What lies past the end may be NaN, and a weight of zero does not make that a zero.
    mask = (start + positions < end)[:, None]
    if DIM_BLOCK > HEAD_DIM:
        mask = mask & (dims < HEAD_DIM)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def begin_rows(sinks_ptr, heads, is_there, scale, HAS_SINKS: tl.constexpr, ROWS: tl.constexpr):
    """Return what `fold_tile` has of ROWS rows before their first turn: (largest, total).

    The sink of a row's head is as a position before all others, whose V is 0. sinks_ptr [HQ]
    float32 are scores that have been scaled, to base e; `heads` [ROWS] tells whose a row is, and
    `is_there` [ROWS] whether it has one.
    """
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=is_there, other=0.0)
        largest = tl.where(is_there, tl.div_rn(sinks * _LOG2_E, scale), largest)
        total = tl.where(is_there, 1.0, total)
    return largest, total


@triton.jit
def fold_tile(scores, v, largest, total, acc, scale, MAY_SEE_NONE: tl.constexpr = False):
    """Fold one turn into the running softmax of M rows; return (largest, total, acc).

    `scores` [M, N] float32 are q k, -inf where hidden; `v` [N, D]. Of the turns up to now `largest`
    [M] is the greatest score, `total` [M] the sum of the weights 2^(scale (score - largest)) and
    `acc` [M, D] the sum of weighted v. A row must see a position of its first turn: afterwards
    hidden ones weigh exactly 0, and a turn without any other multiplies by exactly 1. With
    MAY_SEE_NONE turns before that leave `total` and `acc` at 0.
    """
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    base = new_largest
    if MAY_SEE_NONE:  # -inf less -inf is no number
        base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
    weights = tl.exp2(tl.fma(scores, scale, (-scale * base)[:, None]))
    kept = tl.exp2((largest - base) * scale)
    total = tl.fma(total, kept, tl.sum(weights, 1))
    acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
    return new_largest, total, acc
