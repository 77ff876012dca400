"""Low-rank deltas, and DoRA's gains, on the rows of a batch on a GPU, adapters found by address.

Rows are cut into tiles of one adapter each. Scaling is already inside B. The kernels are in
shrink_expand.py.

Shapes: T rows, K inputs, N outputs, M modules of a fused linear, R the true lora_rank of a slot,
those of its modules one behind the other.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.constants import LAUNCH_OPTIONS
from kernels.gpu.dependent_launch import dependent_options
from kernels.gpu.lora.shrink_expand import expand_blocks, shrink_tile

TILE_ROWS = 16  # the least that tensor cores multiply, and so the least waste for one row
NUM_SHARES = 512  # of `lora_expand`: four for an SM of a Hopper; no bit depends on it

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_BLOCK_RANKS = 16  # small lora_ranks read nothing for others, large ones spread over more programs
_BLOCK_OUTPUTS = 128
_STEPS_PER_PART = 4  # fewer would leave more planes for `lora_expand` to add up
_MAX_PARTS = 8
_FIELDS = 5  # of a slot, before those of its modules
_MODULE_FIELDS = 3


def cut_tiles(runs: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return runs of rows (slot, first row, end row) cut into such of at most TILE_ROWS rows."""
    return [
        (slot, start, min(start + TILE_ROWS, end))
        for slot, first, end in runs
        for start in range(first, end, TILE_ROWS)
    ]


def share_tiles(
    tiles: Sequence[tuple[int, int, int]], lora_ranks: Sequence[int]
) -> npt.NDArray[np.int32]:
    """Return where each share of `lora_expand`'s work begins, and where the last one ends.

    A tile takes as long as its adapter has blocks of ranks; cut evenly, tiles of large ranks would
    be waited for. With each place comes the tile that is there, so that a program needs to read
    one place of memory less before it can begin.

    Args:
        tiles: those of `cut_tiles`.
        lora_ranks: of each tile's adapter.

    Returns:
        [NUM_SHARES + 1, 4] int32: a place in tiles times 2^16, and its tile; of the last the place.
    """
    assert len(lora_ranks) < 1 << 15, "places in tiles times 2^16 are int32"
    costs = -(-np.maximum(lora_ranks, 1) // _BLOCK_RANKS)
    ends = np.concatenate(([0], np.cumsum(costs))).astype(np.float64)
    wanted = np.linspace(0.0, ends[-1], NUM_SHARES + 1)
    places: npt.NDArray[np.float64] = np.interp(wanted, ends, np.arange(len(ends)))
    shares = np.zeros((NUM_SHARES + 1, 4), np.int32)
    shares[:, 0] = np.floor(places * (1 << 16))
    if tiles:
        shares[:-1, 1:] = np.array(tiles)[np.minimum(shares[:-1, 0] >> 16, len(tiles) - 1)]
    return shares


def lora_apply(
    y: Tensor,
    x: Tensor,
    tiles: Tensor,
    table: Tensor,
    widths: tuple[int, ...],
    dtype: torch.dtype,
    max_lora_rank: int,
    shares: Tensor | None = None,
) -> None:
    """Turn the rows of every tile into gain y + shift + B (A x), in place; others stay.

    Float32 from start to end; a sum is rounded once, to y's dtype. Row i depends on row i and its
    slot alone: not on its place in a tile, on other tiles or on `max_lora_rank`.

    The idea, of Punica's SGMV and SGLang's csgmv: rows in tiles of one adapter each, K cut in parts
    whose partial sums are added in a fixed order where they are needed. Ours alone: no adapter is
    padded or copied, each is read where it lies and as far as its own lora_rank goes.

    Args:
        y: [T, N] float32, or x's dtype, each row contiguous; changed in place.
        x: [T, K] float32, float16 or bfloat16, each row contiguous.
        tiles: [num_tiles, 3] int32 of `cut_tiles`, (slot, first row, end row), rows disjoint; one
            with end row = first row does nothing, whatever its slot.
        table: [num_slots, 5 + 3 M] int64, of each slot (address of A [R, K], R, address of gain
            [N] float32 or 0, address of shift [N] float32 or 0, 0) and of each module (address of
            its block of B [its lora_rank, width], its first lora_rank in R, its lora_rank). R = 0:
            the slot leaves all as it is. A and blocks of B are contiguous, start on 16 bytes.
        widths: outputs of the M modules; N is their sum.
        dtype: of A and B, that of x.
        max_lora_rank: at least the R of every slot that a tile names. Bounds grid and scratch.
        shares: [NUM_SHARES + 1, 4] int32 of `share_tiles` for the tiles that are not empty, which
            come first, both from the host; None: all tiles cost the same, and a kernel may have
            made them.
    """
    assert x.dtype == dtype and y.dtype in (dtype, torch.float32), (
        f"one dtype for all, not {x.dtype}, {y.dtype}, {dtype}"
    )
    assert table.shape[1] == _FIELDS + _MODULE_FIELDS * len(widths), "a row of the table per slot"
    if tiles.shape[0] == 0 or max_lora_rank == 0:
        return
    planes = lora_shrink(x, tiles, table, max_lora_rank, are_sent=shares is not None)
    lora_expand(y, planes, tiles, table, widths, dtype, shares)


def lora_shrink(
    x: Tensor, tiles: Tensor, table: Tensor, max_lora_rank: int, *, are_sent: bool
) -> Tensor:
    """Return A x of every row in a tile, as partial sums [parts, T, max_lora_rank] float32.

    u[t, r] = sum over parts of planes[part, t, r]; other elements are not written. Needs no y: it
    can run beside the product that makes y. The arguments are those of `lora_apply`; `are_sent`
    says that the tiles come from the host, so that they can be read before kernels are done.

    Grid (tiles, blocks of 16 lora_ranks, parts of K). The parts depend on K and the dtype alone.
    """
    (num_rows, inputs), wide = x.shape, x.dtype != torch.float32
    assert x.stride(1) == 1 and tiles.is_contiguous() and table.is_contiguous(), "contiguous rows"
    # Float32 has no tensor cores here, and multiplies in registers: smaller steps.
    block_inputs = 256 if wide else 32
    num_steps = triton.cdiv(inputs, block_inputs)
    steps = triton.cdiv(num_steps, min(_MAX_PARTS, triton.cdiv(num_steps, _STEPS_PER_PART)))
    num_parts = triton.cdiv(num_steps, steps)
    planes = torch.empty(num_parts, num_rows, max_lora_rank, device=x.device, dtype=torch.float32)
    grid = (tiles.shape[0], triton.cdiv(max_lora_rank, _BLOCK_RANKS), num_parts)
    shrink_tile[grid](
        x,
        planes,
        tiles,
        table,
        x.stride(0),
        planes.stride(0),
        planes.stride(1),
        FIELDS=table.shape[1],
        INPUTS=inputs,
        STEPS=steps,
        BLOCK_INPUTS=block_inputs,
        BLOCK_RANKS=_BLOCK_RANKS,
        TILE_ROWS=TILE_ROWS,
        num_warps=2 if inputs % 16 == 0 else 4,  # what is read number by number takes registers
        num_stages=3,
        **(dependent_options() if are_sent else LAUNCH_OPTIONS),
    )
    return planes


def lora_expand(
    y: Tensor,
    planes: Tensor,
    tiles: Tensor,
    table: Tensor,
    widths: tuple[int, ...],
    dtype: torch.dtype,
    shares: Tensor | None = None,
) -> None:
    """Turn the rows of every tile into gain y + shift + B u, for the u that `lora_shrink` made.

    As many programs as a GPU runs at once share the blocks of outputs of all tiles, none across two
    modules: a graph has room for a tile of each row, of which most batches fill few. The arguments
    are those of `lora_apply`. For bfloat16, u goes through the tensor cores as the sum of two
    bfloat16 numbers, which is exact to 2^-17 of u; for float16, whose range u may leave, as three
    products of tf32.
    """
    assert y.stride(1) == 1 and y.shape[1] == sum(widths), (
        "y is [T, sum of widths], rows contiguous"
    )
    assert 1 <= len(widths) <= 4, "a gated delta net's first product has four modules"
    width0, width1, width2, width3 = (*widths, 0, 0, 0)[:4]
    num_blocks = tiles.shape[0] * sum(triton.cdiv(width, _BLOCK_OUTPUTS) for width in widths)
    num_programs = min(NUM_SHARES, num_blocks) if shares is None else NUM_SHARES
    expand_blocks[(num_programs,)](
        y,
        planes,
        tiles,
        shares,
        table,
        tiles.shape[0],
        y.stride(0),
        planes.stride(0),
        planes.stride(1),
        DTYPE=_DTYPES[dtype],
        FIELDS=table.shape[1],
        WIDTH0=width0,
        WIDTH1=width1,
        WIDTH2=width2,
        WIDTH3=width3,
        NUM_PARTS=planes.shape[0],
        BLOCK=_BLOCK_OUTPUTS,
        BLOCK_RANKS=_BLOCK_RANKS,
        TILE_ROWS=TILE_ROWS,
        num_warps=2 if y.dtype != torch.float32 else 4,
        num_stages=3,
        **(LAUNCH_OPTIONS if shares is None else dependent_options()),
    )
