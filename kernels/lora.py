"""Low-rank deltas, and DoRA's gains, on the rows of a batch, each run with its own adapter.

By torch, for machines that cannot have kernels.native and for the ends of a model. No neighbour can
change a row, and all is float32, which also keeps the inner vector unrounded and, for few rows,
takes half the time of bfloat16. Scaling and gain are already inside B.

Shapes: T rows, K inputs, N outputs, R the adapter's true lora_rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear import batch_invariant_product

_MIN_ROWS = 4  # what batch_invariant_product asks for
BLOCK_ALIGNMENT = 64  # bytes: each block of B starts on a cache line
CODED_INPUTS = 4  # of A that its codes take together
CODED_RANKS = 4  # of B that its codes take together
WriteRows = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class WriteCodes:
    """How a LoRA becomes int8.

    Each function takes rows, float32 or bfloat16, and memory for their codes, and returns what 1 of
    each row stands for, [R] float32.
    """

    # A [R, K] to int8 [panels]: each of 16 lora_ranks, [K / CODED_INPUTS, lora_ranks,
    # CODED_INPUTS], with zeros behind the last input.
    of_a: WriteRows
    # B transposed [R, N] to int8 [panels]: each of 32 outputs, [R / CODED_RANKS, outputs,
    # CODED_RANKS], with zeros behind the last lora_rank.
    of_b: WriteRows


@dataclass(frozen=True, slots=True)
class LoraSegment:
    """Rows [start, stop) of a batch that share one adapter's A and scaled B.

    Float32 adapters are used as they are, others are widened at every use.

    A is [R, K]. B joins the LoRAs of several modules, each of which turns a run of lora_ranks into
    a run of outputs, and is zero elsewhere. `b` [elements] holds the rest alone, block by block,
    each [ranks, outputs], B transposed. `blocks` [M, 5] int64 on the host tells of each block
    (first rank, end rank, first output, end output, its first element in `b`). No two share an
    output. `join_blocks` makes both.

    `gain` [N] float32 multiplies the outputs before the delta is added, as DoRA does, and then
    `shift` [N] float32 is added; None: neither.
    """

    start: int
    stop: int
    a: Tensor
    b: Tensor
    blocks: Tensor
    gain: Tensor | None = None
    shift: Tensor | None = None


def join_blocks(blocks: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return `b` and `blocks` of a `LoraSegment`.

    Args:
        blocks: at least one pair (first output, B [outputs, ranks]); all of one dtype and device.
            They take the lora_ranks in turn, from 0.
    """
    unit = BLOCK_ALIGNMENT // blocks[0][1].itemsize
    index = []
    rank = size = 0
    for output, b in blocks:
        first = -(-size // unit) * unit
        size = first + b.numel()
        index.append((rank, rank + b.shape[1], output, output + b.shape[0], first))
        rank += b.shape[1]
    data = blocks[0][1].new_zeros(size)
    for (*_, first), (_, b) in zip(index, blocks, strict=True):
        data[first : first + b.numel()].view(b.T.shape).copy_(b.T)
    return data, torch.tensor(index)


def lora_apply(y: Tensor, x: Tensor, segments: Sequence[LoraSegment]) -> None:
    """Turn the rows of every segment into gain y + shift + b (a x), in place; others stay.

    Args:
        y: [T, N] float32 or bfloat16, changed in place; each sum is rounded once.
        x: [T, K].
        segments: disjoint runs of at least one row.
    """
    if not segments:
        return
    if any(segment.gain is not None for segment in segments):
        for segment in segments:
            if segment.gain is not None:
                _apply_with_gain(y, x, segment)
        segments = [segment for segment in segments if segment.gain is None]
        if not segments:
            return
    missing = _MIN_ROWS - x.shape[0]
    if missing > 0:
        x = F.pad(x, (0, 0, 0, missing))
    for segment in segments:
        # A short segment takes its neighbours' rows along: cheaper than padding, and dropped below.
        first = min(segment.start, x.shape[0] - _MIN_ROWS)
        rows = x[first : max(segment.stop, first + _MIN_ROWS)].float()
        inner, b = batch_invariant_product(rows, segment.a.float()), segment.b.float()
        y_rows, of_rows = y[segment.start : segment.stop], segment.start - first
        for first_rank, end_rank, output, end_output, start in segment.blocks.tolist():
            shape = end_output - output, end_rank - first_rank
            block = b.as_strided(shape, (1, shape[0]), b.storage_offset() + start)
            delta = batch_invariant_product(inner[:, first_rank:end_rank], block)
            y_rows[:, output:end_output] += delta[of_rows : of_rows + len(y_rows)]


def _apply_with_gain(y: Tensor, x: Tensor, segment: LoraSegment) -> None:
    """Do `lora_apply` for one segment, in float32 until the end."""
    rows = slice(segment.start, segment.stop)
    y32 = y[rows].to(torch.float32, copy=True)
    apply_gain(y32, segment.gain, segment.shift)
    plain = LoraSegment(0, y32.shape[0], segment.a, segment.b, segment.blocks)
    lora_apply(y32, x[rows], (plain,))
    y[rows] = y32


def apply_gain(y32: Tensor, gain: Tensor | None, shift: Tensor | None = None) -> None:
    """Turn y32 [T, N] float32 into gain y32 + shift in place; None does nothing.

    Product and sum are two operations, not one fused: each is exact to the last bit, so that the
    result does not depend on how a library deals out the rows.
    """
    if gain is not None:
        y32.mul_(gain)
    if shift is not None:
        y32.add_(shift)


def embedding_lora_apply(
    x: Tensor, token_ids: Tensor, a_by_token: Tensor, b: Tensor, gain: Tensor | None
) -> None:
    """Turn embeddings x into gain x + b a[token], in place.

    Args:
        x: [T, H] float32 or bfloat16, the rows of a table; rounded once.
        token_ids: [T] int64, rows of `a_by_token`.
        a_by_token: [V, R].
        b: [H, R], times scaling and gain.
        gain: [H] float32, or None.
    """
    x32 = x.to(torch.float32, copy=True)
    apply_gain(x32, gain)
    rows = F.embedding(token_ids, a_by_token).float()
    missing = max(0, _MIN_ROWS - rows.shape[0])
    if missing:
        rows = F.pad(rows, (0, 0, 0, missing))
    x.copy_(x32 + batch_invariant_product(rows, b.float())[: x.shape[0]])
