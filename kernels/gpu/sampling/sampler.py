"""The next token of every row of logits: the best, or a draw by the noise of kernels.gumbel_noise.

Each chunk of a row has its maxima found and is drawn from by a program of its own, and a last
program for each row merges the chunks and applies top_k and top_p.

Shapes: S rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.constants import LAUNCH_OPTIONS
from kernels.gpu.sampling.block_max import CHUNK, block_max, merged
from kernels.gpu.sampling.gumbel_noise import NOTHING, gumbel_max, id_of, stream_of, value_of
from kernels.gpu.sampling.top_p import (
    depth_of,
    draw_of_top_k,
    draw_within_top_p,
    limit_of,
    mass_of,
)
from kernels.sampling import GREEDY_BELOW

_DRAW_WARPS = 8  # with 4, hashes of 32 tokens a thread leave room for 12 warps on an SM
_TILE = 64  # blocks that the last program reads at once: 2048 tokens
_ROW_WARPS = 8
_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of every row, and its id, the lowest on ties.

    Two launches: the maxima of all chunks of all rows, and a merge for each row.

    Args:
        logits: [S, V] float32, any values; NaN wins over all. Rows may be strided.

    Returns:
        [S] float32 and [S] int64.
    """
    num_rows = logits.shape[0]
    values = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return values, ids
    tops, _ = block_max(logits, with_blocks=False)
    num_chunks = tops.shape[1]
    _merge_chunks[(num_rows,)](
        tops,
        values,
        ids,
        CHUNKS=num_chunks,
        CHUNKS_PADDED=triton.next_power_of_2(num_chunks),
        num_warps=1,
        **LAUNCH_OPTIONS,
    )
    return values, ids


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Return one token id for each row, as kernels.sampling draws it.

    A row is greedy if temperature < 1e-5 or top_k == 1. Else scores are (logit - max) /
    temperature; those below log(min_p) are dropped, the top_k best kept, of those the smallest best
    set that holds top_p of the mass, and the largest score + noise of (seed, position, id) wins.
    The lower id wins every tie.

    Three launches: the maxima of all chunks; draws from all chunks of the rows without top_k; for
    each row the rest (see top_p.py). A pass over whole rows is made by the first two alone,
    unless a row asks for so much of a flat distribution that most blocks take part.

    Args:
        logits: [S, V] float32, finite or -inf; a row with others, or with nothing but -inf, gets
            the id that `argmax` gives. Rows may be strided.
        temperature: [S] float32.
        top_k: [S] int32; 0 or at least V: all.
        top_p: [S] float32; 1 or more: all.
        min_p: [S] float32; 0: all.
        seeds: [S] int64, 64 bits.
        positions: [S] int64, of the tokens to be drawn.

    Returns:
        [S] int64.
    """
    num_rows, vocab = logits.shape
    device = logits.device
    ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return ids
    tops, block_keys = block_max(logits, with_blocks=True)
    num_chunks, num_blocks = tops.shape[1], block_keys.shape[1]
    drawn = torch.empty_like(tops)
    masses = torch.empty_like(tops)
    lists = torch.empty_like(block_keys)
    chunks_padded = triton.next_power_of_2(num_chunks)
    stride = logits.stride(0)
    _draw_chunk[(num_rows, num_chunks)](
        logits,
        temperature,
        top_k,
        min_p,
        seeds,
        positions,
        tops,
        drawn,
        masses,
        stride,
        VOCAB=vocab,
        CHUNK=CHUNK,
        CHUNKS_PADDED=chunks_padded,
        num_warps=_DRAW_WARPS,
        **LAUNCH_OPTIONS,
    )
    _finish_row[(num_rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        positions,
        tops,
        drawn,
        masses,
        block_keys,
        lists,
        ids,
        stride,
        VOCAB=vocab,
        CHUNKS=num_chunks,
        CHUNKS_PADDED=chunks_padded,
        BLOCKS=num_blocks,
        BLOCKS_PADDED=triton.next_power_of_2(num_blocks),
        TILE=_TILE,
        num_warps=_ROW_WARPS,
        **LAUNCH_OPTIONS,
    )
    return ids


@triton.jit
def _merge_chunks(tops_ptr, values_ptr, ids_ptr, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr):
    row = tl.program_id(0)
    top = merged(tops_ptr + row * CHUNKS, CHUNKS, CHUNKS_PADDED)
    tl.store(values_ptr + row, value_of(top))
    tl.store(ids_ptr + row, id_of(top).to(tl.int64))


@triton.jit
def _draw_chunk(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    tops_ptr,
    drawn_ptr,
    masses_ptr,
    stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
):
    row, chunk, num_chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    if (temperature >= _GREEDY_BELOW) & ((top_k <= 0) | (top_k >= VOCAB)):
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        mask = at < VOCAB
        logits = tl.load(logits_ptr + row * stride + at, mask=mask, other=float("-inf"))
        peak = value_of(merged(tops_ptr + row * num_chunks, num_chunks, CHUNKS_PADDED))
        depth = depth_of(logits, peak, temperature)
        limit = limit_of(tl.load(min_p_ptr + row))
        is_kept = mask & (depth <= limit) & (depth < float("inf"))
        stream = stream_of(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        nothing = tl.zeros_like(row) + NOTHING
        drawn = gumbel_max(depth, at, is_kept, stream, nothing)
        tl.store(drawn_ptr + row * num_chunks + chunk, drawn)
        tl.store(masses_ptr + row * num_chunks + chunk, mass_of(depth, is_kept))


@triton.jit
def _finish_row(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    tops_ptr,
    drawn_ptr,
    masses_ptr,
    keys_ptr,
    lists_ptr,
    ids_ptr,
    stride,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    winner = merged(tops_ptr + row * CHUNKS, CHUNKS, CHUNKS_PADDED)
    peak = value_of(winner)
    is_finite = tl.abs(peak) < float("inf")  # a row that has failed gets the id of its best
    if is_finite & (temperature >= _GREEDY_BELOW) & (top_k != 1):
        top_p, limit = tl.load(top_p_ptr + row), limit_of(tl.load(min_p_ptr + row))
        stream = stream_of(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        logits_ptr += row * stride
        keys_ptr += row * BLOCKS
        lists_ptr += row * BLOCKS
        if (top_k > 0) & (top_k < VOCAB):
            mass, drawn = draw_of_top_k(
                logits_ptr,
                keys_ptr,
                lists_ptr,
                peak,
                temperature,
                limit,
                stream,
                top_k,
                VOCAB,
                BLOCKS,
                BLOCKS_PADDED,
                TILE,
            )
        else:
            at = tl.arange(0, CHUNKS_PADDED)
            masses = tl.load(masses_ptr + row * CHUNKS + at, mask=at < CHUNKS, other=0)
            mass = tl.sum(masses)
            drawn = merged(drawn_ptr + row * CHUNKS, CHUNKS, CHUNKS_PADDED)
        if top_p < 1.0:
            drawn = draw_within_top_p(
                logits_ptr,
                keys_ptr,
                lists_ptr,
                peak,
                temperature,
                limit,
                stream,
                top_p.to(tl.float64) * mass.to(tl.float64),
                drawn,
                VOCAB,
                BLOCKS,
                BLOCKS_PADDED,
                TILE,
            )
        winner = tl.where(drawn == NOTHING, winner, drawn)
    tl.store(ids_ptr + row, id_of(winner).to(tl.int64))
