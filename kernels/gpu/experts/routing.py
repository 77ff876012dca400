"""The experts of each row, and the pairs of rows and experts sorted by expert, on a GPU.

Nothing is asked of the host: grids follow from the number of rows, and a program finds what it has
to do in `RoutedRows.starts`.

Shapes: T rows, k experts of a row, P = T k pairs, E experts of this rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts import RoutedRows, Routing
from kernels.gpu.constants import LAUNCH_OPTIONS

_LEAST = tl.constexpr(-(2**31))  # a key below those of all numbers
_BLOCK_PAIRS = 1024


def route(logits: Tensor, routing: Routing) -> RoutedRows:
    """See `kernels.interface.Kernels.route`.

    A program chooses for one row. Then one for each expert, and one for those of other ranks, goes
    twice through all pairs: P E steps of integers, few beside the products.

    Args:
        logits: [T, experts of all ranks] float32, float16 or bfloat16, each row contiguous.
        routing: how.

    Returns:
        With int32 for integers.
    """
    (num_rows, num_logits), top_k = logits.shape, routing.top_k
    assert logits.stride(1) == 1 and top_k <= num_logits, "rows of enough logits"

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    experts = empty(num_rows, top_k)
    routed = RoutedRows(
        weights=empty(num_rows, top_k, dtype=torch.float32),
        positions=empty(num_rows, top_k),
        rows=empty(num_rows * top_k),
        starts=empty(routing.num_experts + 1),
    )
    if num_rows > 0:
        _route_row[(num_rows,)](
            logits,
            experts,
            routed.weights,
            logits.stride(0),
            NUM_LOGITS=num_logits,
            TOP_K=top_k,
            IS_RENORMALIZED=routing.renormalize,
            BLOCK=triton.next_power_of_2(num_logits),
            BLOCK_K=triton.next_power_of_2(top_k),
            num_warps=1,
            **LAUNCH_OPTIONS,
        )
    _place_pairs[(routing.num_experts + 1,)](
        experts,
        routed.positions,
        routed.rows,
        routed.starts,
        num_rows * top_k,
        routing.first_expert,
        NUM_EXPERTS=routing.num_experts,
        TOP_K=top_k,
        BLOCK=_BLOCK_PAIRS,
        num_warps=4,
        **LAUNCH_OPTIONS,
    )
    return routed


@triton.jit
def _keys(x):
    """Return integers in the order of x: NaN above all, zeros of both signs alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, keys)


@triton.jit
def _route_row(
    logits_ptr,
    experts_ptr,
    weights_ptr,
    stride,
    NUM_LOGITS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_RENORMALIZED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids, slots = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    is_expert = ids < NUM_LOGITS
    x = tl.load(logits_ptr + row * stride + ids, mask=is_expert, other=0.0).to(tl.float32)
    keys = tl.where(is_expert, _keys(x), _LEAST)
    experts = tl.zeros((BLOCK_K,), tl.int32)
    chosen = tl.zeros((BLOCK_K,), tl.float32)
    for slot in tl.static_range(TOP_K):
        expert = tl.min(tl.where(keys == tl.max(keys, 0), ids, BLOCK), 0)
        experts = tl.where(slots == slot, expert, experts)
        chosen = tl.where(slots == slot, tl.sum(tl.where(ids == expert, x, 0.0), 0), chosen)
        keys = tl.where(ids == expert, _LEAST, keys)
    best = tl.sum(tl.where(slots == 0, chosen, 0.0), 0)
    is_slot = slots < TOP_K
    terms = tl.exp(chosen - best)
    if IS_RENORMALIZED:
        total = tl.sum(tl.where(is_slot, terms, 0.0), 0)
    else:
        total = tl.sum(tl.where(is_expert, tl.exp(x - best), 0.0), 0)
    tl.store(experts_ptr + row * TOP_K + slots, experts, mask=is_slot)
    tl.store(weights_ptr + row * TOP_K + slots, terms / total, mask=is_slot)


@triton.jit
def _own_numbers(experts_ptr, pairs, num_pairs, first_expert, NUM_EXPERTS: tl.constexpr):
    """Return this rank's numbers of experts: the one behind its last for those of other ranks."""
    own = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=0) - first_expert
    own = tl.where((own < 0) | (own >= NUM_EXPERTS), NUM_EXPERTS, own)
    return tl.where(pairs < num_pairs, own, NUM_EXPERTS + 1)


# Batches differ in these, and a kernel of its own would be compiled while they wait.
@triton.jit(do_not_specialize=["num_pairs", "first_expert"])
def _place_pairs(
    experts_ptr,
    positions_ptr,
    rows_ptr,
    starts_ptr,
    num_pairs,
    first_expert,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    num_before = tl.zeros((), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        own = _own_numbers(experts_ptr, pairs, num_pairs, first_expert, NUM_EXPERTS)
        num_before += tl.sum((own < expert).to(tl.int32), 0)
    tl.store(starts_ptr + expert, num_before)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        own = _own_numbers(experts_ptr, pairs, num_pairs, first_expert, NUM_EXPERTS)
        is_own = (own == expert).to(tl.int32)
        places = num_before + tl.cumsum(is_own, 0) - 1
        tl.store(positions_ptr + pairs, places, mask=is_own == 1)
        tl.store(rows_ptr + places, pairs // TOP_K, mask=is_own == 1)
        num_before += tl.sum(is_own, 0)


@triton.jit
def expert_of(starts_ptr, at, TILE: tl.constexpr, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return (expert, its first pair, the end of its pairs, its first tile) of a tile of pairs.

    Tiles of up to TILE pairs stand one expert's behind the other's; behind the last the expert is
    NUM_EXPERTS.
    """
    ids = tl.arange(0, BLOCK)
    is_expert = ids < NUM_EXPERTS
    starts = tl.load(starts_ptr + ids, mask=is_expert, other=0)
    ends = tl.load(starts_ptr + 1 + ids, mask=is_expert, other=0)
    num_tiles = (ends - starts + TILE - 1) // TILE
    ends_of_tiles = tl.cumsum(num_tiles, 0)
    expert = tl.sum((is_expert & (ends_of_tiles <= at)).to(tl.int32), 0)
    is_this = ids == expert
    return (
        expert,
        tl.sum(tl.where(is_this, starts, 0), 0),
        tl.sum(tl.where(is_this, ends, 0), 0),
        tl.sum(tl.where(is_this, ends_of_tiles - num_tiles, 0), 0),
    )
