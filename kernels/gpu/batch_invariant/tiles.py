"""The batch-invariant product by tiles of rows and outputs, on any GPU; linear.py has the reasons.

Shapes: T rows, K inputs, N outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.constants import LAUNCH_OPTIONS

FEW_ROWS = 256  # up to here the weight is what is waited for: small tiles, more programs
_MANY_OUTPUTS = 8192  # from here small tiles of 64 outputs are enough for all SMs


def tiled_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, num_parts: int
) -> None:
    """Write the product into y; the arguments are those of `batch_invariant_linear`.

    Grid (blocks of rows times blocks of outputs), neighbours in groups of 8 blocks of rows so that
    they share weights in L2.
    """
    (num_rows, inputs), outputs = x.shape, weight.shape[0]
    block_rows, block_outputs, block_inputs, num_warps, num_stages = tile_sizes(
        x.dtype, num_rows, outputs, num_parts
    )
    num_blocks = triton.cdiv(num_rows, block_rows) * triton.cdiv(outputs, block_outputs)
    product_tile[(num_blocks,)](
        x,
        weight,
        bias,
        y,
        num_rows,
        x.stride(0),
        inputs // num_parts,
        num_parts,
        OUTPUTS=outputs,
        INPUTS=inputs,
        NUM_PARTS=num_parts,
        IS_WHOLE=inputs // num_parts % block_inputs == 0,
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_OUTPUTS=block_outputs,
        BLOCK_INPUTS=block_inputs,
        num_warps=num_warps,
        num_stages=num_stages,
        **LAUNCH_OPTIONS,
    )


def tile_sizes(
    dtype: torch.dtype, num_rows: int, outputs: int, num_parts: int
) -> tuple[int, int, int, int, int]:
    """Return rows, outputs and inputs of a tile, warps and stages."""
    if dtype == torch.float32:  # no tensor cores: one tile for all, small enough for registers
        return 32, 64, 32, 4, 3
    if num_rows <= FEW_ROWS:
        return 64, 64 if outputs >= _MANY_OUTPUTS else 32, 64, 4, 5
    # A tree over more parts keeps more sums in registers.
    return 128, 128 if num_parts <= 2 else 64, 64, 8, 3


@triton.jit
def sum_part(x_ptrs, weight_ptrs, is_row, is_output, part_inputs, IS_WHOLE: tl.constexpr):
    """Return x[rows, part] weight[outputs, part] transposed; the part is where the pointers are."""
    total = tl.zeros((x_ptrs.shape[0], weight_ptrs.shape[1]), tl.float32)
    inner = tl.arange(0, x_ptrs.shape[1])
    for start in range(0, part_inputs, x_ptrs.shape[1]):
        if IS_WHOLE:  # in BLOCK_INPUTS
            is_x, is_weight = is_row[:, None], is_output[None, :]
        else:
            is_input = start + inner < part_inputs
            is_x = is_row[:, None] & is_input[None, :]
            is_weight = is_output[None, :] & is_input[:, None]
        x = tl.load(x_ptrs + start, mask=is_x, other=0.0)
        weight = tl.load(weight_ptrs + start, mask=is_weight, other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    return total


@triton.jit
def sum_parts(
    x_ptrs,
    weight_ptrs,
    is_row,
    is_output,
    part_inputs,
    num_parts,
    IS_WHOLE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):
    """Return the sum of 2, 4 or 8 parts as the root of their tree.

    Unrolled, the loop would keep the addresses of all parts in registers: `num_parts` is NUM_PARTS,
    unknown to the compiler. A branch is held until its sibling is done, and is garbage before.
    """
    one = tl.zeros((x_ptrs.shape[0], weight_ptrs.shape[1]), tl.float32)
    two, four, root = one, one, one
    for part in range(num_parts):
        at = part * part_inputs
        total = sum_part(x_ptrs + at, weight_ptrs + at, is_row, is_output, part_inputs, IS_WHOLE)
        pair = one + total
        one = total
        root = pair
        if NUM_PARTS > 2:
            root = two + pair
            two = tl.where(part % 4 == 1, pair, two)
        if NUM_PARTS > 4:
            half = root
            root = four + half
            four = tl.where(part == 3, half, four)
    return root


@triton.jit
def block_of(
    block,
    num_rows,
    OUTPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """Return which block of rows and which of outputs a number means."""
    GROUP: tl.constexpr = 8
    blocks_of_outputs: tl.constexpr = (OUTPUTS + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS
    group = block // (GROUP * blocks_of_outputs)
    in_group = block % (GROUP * blocks_of_outputs)
    group_rows = tl.minimum(tl.cdiv(num_rows, BLOCK_ROWS) - group * GROUP, GROUP)
    return group * GROUP + in_group % group_rows, in_group // group_rows


# Batches differ in these, and a kernel of its own would be compiled while they wait.
@triton.jit(do_not_specialize=["num_rows"])
def product_tile(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    x_stride,
    part_inputs,
    num_parts,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    row_block, output_block = block_of(
        tl.program_id(0), num_rows, OUTPUTS, BLOCK_ROWS, BLOCK_OUTPUTS
    )
    rows = (row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    outputs = (output_block * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)).to(tl.int64)
    inner = tl.arange(0, BLOCK_INPUTS)
    is_row, is_output = rows < num_rows, outputs < OUTPUTS
    x_ptrs = x_ptr + rows[:, None] * x_stride + inner[None, :]
    weight_ptrs = weight_ptr + outputs[None, :] * INPUTS + inner[:, None]
    if NUM_PARTS == 1:
        total = sum_part(x_ptrs, weight_ptrs, is_row, is_output, part_inputs, IS_WHOLE)
    else:
        total = sum_parts(
            x_ptrs, weight_ptrs, is_row, is_output, part_inputs, num_parts, IS_WHOLE, NUM_PARTS
        )
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + rows[:, None] * OUTPUTS + outputs[None, :]
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])
