"""The best tokens of a row: its top_k, and of those the draw that lies within top_p.

Few tokens are looked at. The best of every block of 32 tokens is known (block_max.py): the k best
tokens lie in the k best blocks, and what beats a token lies in blocks whose best beats it. So a
pass goes over a list of blocks, as a rule a small one.

Nothing is sorted. A rank in the order (depth, then id) is found by bisection over the bits of the
depth. The nucleus is not made at all: a draw lies in it if the mass of the tokens better than it is
below top_p; if not, the tokens from the draw on are out and the next draw is the best of the rest.
That halves the rest's mass on average, and is exactly the best draw within the nucleus. Masses are
integers, in 2^-40 of the best token's: their sums have no order.
"""

import triton
import triton.language as tl

from kernels.gpu.sampling.block_max import SUB
from kernels.gpu.sampling.gumbel_noise import NOTHING, gumbel_max, id_of, value_of_key

_INFINITE = tl.constexpr(0x7F800000)  # bits of an infinite depth
_MASS_UNIT = tl.constexpr(2.0**40)


@triton.jit
def depth_of(logits, peak, temperature):
    """Return how far the scores logit / temperature lie below the best, rounded as on the CPU."""
    return tl.div_rn(peak - logits, tl.zeros_like(logits) + temperature)


@triton.jit
def limit_of(min_p):
    """Return the greatest depth that min_p allows; none of them if it is 0."""
    limit = -tl.log(tl.where(min_p > 0.0, min_p, 1.0).to(tl.float64))
    return tl.where(min_p > 0.0, limit.to(tl.float32), float("inf"))


@triton.jit
def mass_of(depth, is_kept):
    """Return the mass of a tile's kept tokens, in units."""
    return tl.sum((tl.where(is_kept, tl.exp(-depth), 0.0) * _MASS_UNIT).to(tl.int64))


@triton.jit
def _bits(depth):
    """Return int32 in the order of depths; infinite ones, then NaN, above all others."""
    return depth.to(tl.int32, bitcast=True)


@triton.jit
def _block_depths(keys_ptr, peak, temperature, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    """Return the bits of the depth of every block's best token, as [PADDED]."""
    at = tl.arange(0, PADDED)
    keys = tl.load(keys_ptr + at, mask=at < BLOCKS, other=0)
    depth = _bits(depth_of(value_of_key(keys), peak, temperature))
    return tl.where(at < BLOCKS, depth, 0x7FFFFFFF)


@triton.jit
def _list_blocks(depths, list_ptr, bound, PADDED: tl.constexpr):
    """Write the blocks whose best is at most `bound` deep to the row's list; return how many."""
    is_listed = depths <= bound
    place = tl.cumsum(is_listed.to(tl.int32), 0) - 1
    tl.debug_barrier()  # other threads may still be reading the list before
    tl.store(list_ptr + place, tl.arange(0, PADDED), mask=is_listed)
    tl.debug_barrier()
    return tl.sum(is_listed.to(tl.int32))


@triton.jit
def _tile(
    start, logits_ptr, list_ptr, count, peak, temperature, VOCAB: tl.constexpr, TILE: tl.constexpr
):
    """Return (depth, ids) of the tokens of TILE listed blocks; infinitely deep where none is."""
    at = start + tl.arange(0, TILE)
    blocks = tl.load(list_ptr + at, mask=at < count, other=0)
    ids = blocks[:, None] * SUB + tl.arange(0, SUB)[None, :]
    mask = (at < count)[:, None] & (ids < VOCAB)
    logits = tl.load(logits_ptr + ids, mask=mask, other=float("-inf"))
    depth = depth_of(logits, peak, temperature)
    return tl.where(mask, depth, float("inf")), ids


@triton.jit
def _bound_of_blocks(depths, k):
    """Return a bound that the k best of [n] depths, and those tied with them, do not exceed."""
    low, high = k * 0, k * 0 + _INFINITE
    while low < high:
        middle = low + (high - low) // 2
        num = tl.sum((depths <= middle).to(tl.int32))
        high = tl.where(num >= k, middle, high)
        low = tl.where(num > k, low, tl.where(num == k, middle, middle + 1))
    return high


@triton.jit
def _count(
    logits_ptr,
    list_ptr,
    count,
    peak,
    temperature,
    bound,
    bound_id,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return how many listed tokens are better than (bound, bound_id)."""
    total = tl.zeros_like(count)
    for start in range(0, count, TILE):
        depth, ids = _tile(start, logits_ptr, list_ptr, count, peak, temperature, VOCAB, TILE)
        bits = _bits(depth)
        is_better = (bits < bound) | ((bits == bound) & (ids < bound_id))
        total += tl.sum(is_better.to(tl.int32))
    return total


@triton.jit
def _weigh(
    logits_ptr,
    list_ptr,
    count,
    peak,
    temperature,
    limit,
    stream,
    bound,
    bound_id,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the mass and the packed best draw of the listed tokens better than (bound, id)."""
    mass = tl.zeros_like(stream).to(tl.int64)
    best = mass + NOTHING
    for start in range(0, count, TILE):
        depth, ids = _tile(start, logits_ptr, list_ptr, count, peak, temperature, VOCAB, TILE)
        bits = _bits(depth)
        is_kept = (bits < bound) | ((bits == bound) & (ids < bound_id))
        is_kept &= (depth <= limit) & (bits < _INFINITE)
        mass += mass_of(depth, is_kept)
        best = gumbel_max(depth, ids, is_kept, stream, best)
    return mass, best


@triton.jit
def draw_of_top_k(
    logits_ptr,
    keys_ptr,
    list_ptr,
    peak,
    temperature,
    limit,
    stream,
    k,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the mass and the packed best draw of the k best tokens; the lower ids of a tie."""
    depths = _block_depths(keys_ptr, peak, temperature, BLOCKS, PADDED)
    bound = _bound_of_blocks(depths, k)
    count = _list_blocks(depths, list_ptr, bound, PADDED)
    low = k * 0
    while low < bound:  # a depth that exactly k do not exceed, or that of the k-th
        middle = low + (bound - low) // 2
        num = _count(logits_ptr, list_ptr, count, peak, temperature, middle, VOCAB, VOCAB, TILE)
        bound = tl.where(num >= k, middle, bound)
        low = tl.where(num > k, low, tl.where(num == k, middle, middle + 1))
    num = _count(logits_ptr, list_ptr, count, peak, temperature, bound, VOCAB, VOCAB, TILE)
    bound_id = k * 0 + VOCAB
    first = tl.where(num > k, 0, bound_id)
    while first < bound_id:  # more are tied: the id behind the k-th
        middle = first + (bound_id - first) // 2
        num = _count(logits_ptr, list_ptr, count, peak, temperature, bound, middle, VOCAB, TILE)
        bound_id = tl.where(num >= k, middle, bound_id)
        first = tl.where(num >= k, first, middle + 1)
    return _weigh(
        logits_ptr,
        list_ptr,
        count,
        peak,
        temperature,
        limit,
        stream,
        bound,
        bound_id,
        VOCAB,
        TILE,
    )


@triton.jit
def draw_within_top_p(
    logits_ptr,
    keys_ptr,
    list_ptr,
    peak,
    temperature,
    limit,
    stream,
    allowed,
    drawn,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return `drawn` if the mass before it is below `allowed`, else the best draw that is so.

    Args:
        allowed: float64, in units of mass.
        drawn: packed; the best draw of a set that holds every token better than it.
    """
    is_open = drawn != NOTHING
    while is_open:
        token = id_of(drawn)
        bound = _bits(depth_of(tl.load(logits_ptr + token), peak, temperature))
        # Read again each time: kept from turn to turn, they would fill the registers.
        depths = _block_depths(keys_ptr, peak, temperature, BLOCKS, PADDED)
        count = _list_blocks(depths, list_ptr, bound, PADDED)
        before, next_drawn = _weigh(
            logits_ptr,
            list_ptr,
            count,
            peak,
            temperature,
            limit,
            stream,
            bound,
            token,
            VOCAB,
            TILE,
        )
        is_open = (before > 0) & (before.to(tl.float64) >= allowed)  # the best is always in
        drawn = tl.where(is_open, next_drawn, drawn)
    return drawn
