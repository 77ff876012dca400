"""The batch-invariant product of many rows on Hopper, whose tiles the memory accelerator copies.

A tile's copy is one instruction of one thread, which leaves registers for larger tiles. The sums
are those of tiles.py, in the same order.

Shapes: T rows, K inputs, N outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.gpu.batch_invariant.tiles import block_of
from kernels.gpu.constants import LAUNCH_OPTIONS

_HOPPER = (9, 0)  # what this was measured on
_ALIGNMENT = 16  # bytes, of where rows begin
_DEPTH = 64  # inputs of a tile
_WHOLE_TILE = (256, 128)  # rows and outputs of a tile where K is one part
_PARTS_TILE = (128, 128)
_LEVELS = tl.constexpr(3)  # of a tree of at most 8 parts


def has_bulk_copies(x: Tensor, weight: Tensor, num_parts: int) -> bool:
    """Tell whether a GPU and the shapes are those that `bulk_product` is made for."""
    return (
        x.is_cuda
        and torch.cuda.get_device_capability(x.device) == _HOPPER
        and fits_bulk_copies(x, weight, num_parts)
    )


def fits_bulk_copies(x: Tensor, weight: Tensor, num_parts: int) -> bool:
    """Tell whether the accelerator can copy tiles of these, and a part is whole tiles."""
    is_aligned = all(
        one.data_ptr() % _ALIGNMENT == 0 and one.stride(0) * one.itemsize % _ALIGNMENT == 0
        for one in (x, weight)
    )
    return x.dtype != torch.float32 and is_aligned and x.shape[1] % (num_parts * _DEPTH) == 0


def bulk_product(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, num_parts: int) -> None:
    """Write the product into y; the arguments are those of `batch_invariant_linear`.

    With one part, grid (blocks of rows times blocks of outputs). With several, as many programs as
    there are SMs share the blocks, and each keeps the branches of its tree in memory of its own:
    in registers they would make the tiles small.
    """
    (num_rows, inputs), outputs = x.shape, weight.shape[0]
    rows, columns = _WHOLE_TILE if num_parts == 1 else _PARTS_TILE
    num_programs = triton.cdiv(num_rows, rows) * triton.cdiv(outputs, columns)
    branches = None
    if num_parts > 1:
        num_programs = min(num_programs, _num_processors(x.device))
        branches = torch.empty(
            num_programs, _LEVELS.value, rows, columns, device=x.device, dtype=torch.float32
        )
    _bulk_blocks[(num_programs,)](
        TensorDescriptor.from_tensor(x, [rows, _DEPTH]),
        TensorDescriptor.from_tensor(weight, [columns, _DEPTH]),
        bias,
        y,
        branches,
        num_rows,
        inputs // num_parts,
        num_parts,
        OUTPUTS=outputs,
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=rows,
        BLOCK_OUTPUTS=columns,
        BLOCK_INPUTS=_DEPTH,
        num_warps=8,
        num_stages=4,
        **LAUNCH_OPTIONS,
    )


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # interpreted: enough for programs to share blocks
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _bulk_sum(
    x_tiles,
    weight_tiles,
    first_row,
    first_output,
    first_input,
    part_inputs,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """Return x[rows, part] weight[outputs, part] transposed, as `sum_part` does."""
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    for start in range(first_input, first_input + part_inputs, BLOCK_INPUTS):
        x = x_tiles.load([first_row, start])
        weight = weight_tiles.load([first_output, start])
        total = tl.dot(x, weight.T, total)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _bulk_blocks(
    x_tiles,
    weight_tiles,
    bias_ptr,
    y_ptr,
    branches_ptr,
    num_rows,
    part_inputs,
    num_parts,
    OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    SIZE: tl.constexpr = BLOCK_ROWS * BLOCK_OUTPUTS
    in_block = tl.arange(0, BLOCK_ROWS)[:, None] * BLOCK_OUTPUTS
    in_block += tl.arange(0, BLOCK_OUTPUTS)[None, :]
    if branches_ptr is not None:
        branches_ptr += tl.program_id(0).to(tl.int64) * (_LEVELS * SIZE) + in_block
    blocks = tl.cdiv(num_rows, BLOCK_ROWS) * ((OUTPUTS + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        row_block, output_block = block_of(block, num_rows, OUTPUTS, BLOCK_ROWS, BLOCK_OUTPUTS)
        first_row, first_output = row_block * BLOCK_ROWS, output_block * BLOCK_OUTPUTS
        total = _bulk_sum(
            x_tiles,
            weight_tiles,
            first_row,
            first_output,
            0,
            part_inputs,
            BLOCK_ROWS,
            BLOCK_OUTPUTS,
            BLOCK_INPUTS,
        )
        if branches_ptr is not None:
            tl.store(branches_ptr, total)
            tl.debug_barrier()  # what a thread stores, another one may load
            for part in range(1, num_parts):
                total = _bulk_sum(
                    x_tiles,
                    weight_tiles,
                    first_row,
                    first_output,
                    part * part_inputs,
                    part_inputs,
                    BLOCK_ROWS,
                    BLOCK_OUTPUTS,
                    BLOCK_INPUTS,
                )
                # A branch is added to its sibling as soon as that is done, level by level.
                level = 0
                while (part >> level) % 2 == 1:
                    total = tl.load(branches_ptr + level * SIZE) + total
                    level += 1
                if part + 1 < num_parts:
                    tl.store(branches_ptr + level * SIZE, total)
                    tl.debug_barrier()
        rows = (first_row + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        outputs = first_output + tl.arange(0, BLOCK_OUTPUTS)
        is_row, is_output = rows < num_rows, outputs < OUTPUTS
        if HAS_BIAS:
            bias = tl.load(bias_ptr + outputs, mask=is_output, other=0.0)
            total += bias.to(tl.float32)[None, :]
        y_ptrs = y_ptr + rows[:, None] * OUTPUTS + outputs[None, :]
        is_there = is_row[:, None] & is_output[None, :]
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=is_there)
