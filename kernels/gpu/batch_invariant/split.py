"""The batch-invariant product of few rows, the parts of K beside each other.

Few rows and outputs make few tiles, and a program that goes through all of K waits for memory more
than it reads. What the parts add up to is what one program makes of them: the same tree.

Shapes: T rows, K inputs, N outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.batch_invariant.tiles import sum_part
from kernels.gpu.constants import LAUNCH_OPTIONS

SPLIT_ROWS = 64  # up to here the parts' sums are little beside the weight
_SUMMED_AT_ONCE = 1024


def split_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, num_parts: int
) -> None:
    """Write the product into y; the arguments are those of `batch_invariant_linear`.

    Grid (blocks of outputs, parts, blocks of rows), each leaves a plane's piece; then the planes
    are added.
    """
    (num_rows, inputs), outputs = x.shape, weight.shape[0]
    has_tensor_cores = x.dtype != torch.float32
    # Rows, outputs and inputs of a tile.
    rows, columns, depth = (64, 128, 64) if has_tensor_cores else (32, 64, 32)
    planes = torch.empty(num_parts, num_rows, outputs, device=x.device, dtype=torch.float32)
    grid = (triton.cdiv(outputs, columns), num_parts, triton.cdiv(num_rows, rows))
    _part_tile[grid](
        x,
        weight,
        planes,
        num_rows,
        x.stride(0),
        inputs // num_parts,
        OUTPUTS=outputs,
        INPUTS=inputs,
        IS_WHOLE=inputs // num_parts % depth == 0,
        BLOCK_ROWS=rows,
        BLOCK_OUTPUTS=columns,
        BLOCK_INPUTS=depth,
        num_warps=4,
        num_stages=3,
        **LAUNCH_OPTIONS,
    )
    size = num_rows * outputs
    _add_planes[(triton.cdiv(size, _SUMMED_AT_ONCE),)](
        planes,
        bias,
        y,
        size,
        OUTPUTS=outputs,
        NUM_PARTS=num_parts,
        HAS_BIAS=bias is not None,
        BLOCK=_SUMMED_AT_ONCE,
        num_warps=4,
        **LAUNCH_OPTIONS,
    )


# Batches differ in the number of rows; a kernel of its own for one of them would be compiled then.
@triton.jit(do_not_specialize=["num_rows"])
def _part_tile(
    x_ptr,
    weight_ptr,
    planes_ptr,
    num_rows,
    x_stride,
    part_inputs,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    part = tl.program_id(1)
    rows = (tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    outputs = (tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)).to(tl.int64)
    inner = part * part_inputs + tl.arange(0, BLOCK_INPUTS)
    is_row, is_output = rows < num_rows, outputs < OUTPUTS
    x_ptrs = x_ptr + rows[:, None] * x_stride + inner[None, :]
    weight_ptrs = weight_ptr + outputs[None, :] * INPUTS + inner[:, None]
    total = sum_part(x_ptrs, weight_ptrs, is_row, is_output, part_inputs, IS_WHOLE)
    at = (part * num_rows + rows[:, None]) * OUTPUTS + outputs[None, :]
    tl.store(planes_ptr + at, total, mask=is_row[:, None] & is_output[None, :])


@triton.jit(do_not_specialize=["size"])
def _add_planes(
    planes_ptr,
    bias_ptr,
    y_ptr,
    size,
    OUTPUTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = the planes [parts, T, N] added as a tree, in pairs of pairs, and the bias last."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < size
    total = _pair(planes_ptr + at, size, is_there)
    if NUM_PARTS > 2:
        total += _pair(planes_ptr + 2 * size + at, size, is_there)
    if NUM_PARTS > 4:
        low = _pair(planes_ptr + 4 * size + at, size, is_there)
        total += low + _pair(planes_ptr + 6 * size + at, size, is_there)
    if HAS_BIAS:
        total += tl.load(bias_ptr + at % OUTPUTS, mask=is_there, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=is_there)


@triton.jit
def _pair(plane_ptrs, size, is_there):
    """Return two neighbouring planes, added."""
    low = tl.load(plane_ptrs, mask=is_there, other=0.0)
    return low + tl.load(plane_ptrs + size, mask=is_there, other=0.0)
