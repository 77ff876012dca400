"""The products of rows that stand by expert with the weights of each expert, on a GPU.

A tile holds rows of one expert and is computed as in kernels.gpu.batch_invariant.linear, whose
reasons hold here: a row has the same bits whatever rows stand beside it.

Shapes: P pairs of a row and an expert, E experts, K inputs, N outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts import ExpertsWeight, RoutedRows
from kernels.gpu.batch_invariant.tiles import sum_part, tile_sizes
from kernels.gpu.constants import LAUNCH_OPTIONS
from kernels.gpu.experts.routing import expert_of


def grouped_linear(x: Tensor, weight: ExpertsWeight, routed: RoutedRows) -> Tensor:
    """Return each pair's x @ its expert's weight transposed + bias.

    Grid: as many tiles of rows as there can be, times blocks of outputs; the tiles that a batch
    does not have end at once. Neighbours are in groups of 8 tiles, which share weights in L2.

    Args:
        x: [P, K] float32, float16 or bfloat16, each row contiguous; P may be 0.
        weight: of the same dtype, all experts in one plain linear [E N, K].
        routed: where the pairs of each expert stand.

    Returns:
        [P, N] of x's dtype, of which rows of other ranks' experts are not written.
    """
    (num_pairs, inputs), outputs = x.shape, weight.out_features
    (all_experts,) = weight.linears
    assert x.dtype == weight.dtype, f"one dtype, not {x.dtype} and {weight.dtype}"
    assert x.stride(1) == 1 and all_experts.data.is_contiguous(), "contiguous rows"
    y = torch.empty(num_pairs, outputs, device=x.device, dtype=x.dtype)
    if num_pairs == 0:
        return y
    block_rows, block_outputs, block_inputs, num_warps, num_stages = tile_sizes(
        x.dtype, num_pairs // weight.num_experts, outputs, 1
    )
    # One tile that is not full for each expert that has pairs at all.
    num_tiles = num_pairs // block_rows + min(num_pairs, weight.num_experts)
    _grouped_tile[(num_tiles * triton.cdiv(outputs, block_outputs),)](
        x,
        all_experts.data,
        all_experts.bias,
        y,
        routed.starts,
        num_tiles,
        x.stride(0),
        inputs,
        NUM_EXPERTS=weight.num_experts,
        BLOCK_EXPERTS=triton.next_power_of_2(weight.num_experts),
        OUTPUTS=outputs,
        INPUTS=inputs,
        IS_WHOLE=inputs % block_inputs == 0,
        HAS_BIAS=all_experts.bias is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_OUTPUTS=block_outputs,
        BLOCK_INPUTS=block_inputs,
        num_warps=num_warps,
        num_stages=num_stages,
        **LAUNCH_OPTIONS,
    )
    return y


# Batches differ in these, and a kernel of its own would be compiled while they wait.
@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_tile(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    starts_ptr,
    num_tiles,
    x_stride,
    inputs,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    GROUP: tl.constexpr = 8
    blocks_of_outputs: tl.constexpr = (OUTPUTS + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS
    group = tl.program_id(0) // (GROUP * blocks_of_outputs)
    in_group = tl.program_id(0) % (GROUP * blocks_of_outputs)
    group_tiles = tl.minimum(num_tiles - group * GROUP, GROUP)
    tile = group * GROUP + in_group % group_tiles
    expert, start, end, first_tile = expert_of(
        starts_ptr, tile, BLOCK_ROWS, NUM_EXPERTS, BLOCK_EXPERTS
    )
    if expert >= NUM_EXPERTS:
        return
    rows = start + (tile - first_tile) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)
    outputs = in_group // group_tiles * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS).to(tl.int64)
    inner = tl.arange(0, BLOCK_INPUTS)
    is_row, is_output = rows < end, outputs < OUTPUTS
    weight_rows = expert.to(tl.int64) * OUTPUTS + outputs
    x_ptrs = x_ptr + rows[:, None] * x_stride + inner[None, :]
    weight_ptrs = weight_ptr + weight_rows[None, :] * INPUTS + inner[:, None]
    total = sum_part(x_ptrs, weight_ptrs, is_row, is_output, inputs, IS_WHOLE)
    if HAS_BIAS:
        total += tl.load(bias_ptr + weight_rows, mask=is_output, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + rows[:, None] * OUTPUTS + outputs[None, :]
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])
