"""The norm and the gate between a recurrence and its output projection, on a GPU.

A group's squares are added by one tile that spans the group, whatever stands around it.

Shapes: T rows, W features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.constants import LAUNCH_OPTIONS
from kernels.recurrent.weights import SharedSquares

_ELEMENTS_OF_A_THREAD = 4  # 16 bytes of float32
_MAX_WARPS = 16


def gated_squares(x: Tensor, gate: Tensor, *, gate_first: bool) -> Tensor:
    """Return the squares of what is normed, added up: [T, 1] float32; see `RecurrentKernels`."""
    num_rows, width = x.shape
    assert x.is_contiguous() and gate.stride(1) == 1, "the features of a row are contiguous"
    sums = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    if num_rows > 0:
        block = triton.next_power_of_2(width)
        _sum_row[(num_rows,)](
            x,
            gate,
            sums,
            gate.stride(0),
            WIDTH=width,
            GATE_FIRST=gate_first,
            BLOCK=block,
            num_warps=_num_warps(block),
            **LAUNCH_OPTIONS,
        )
    return sums


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    group_size: int,
    eps: float,
    dtype: torch.dtype,
    *,
    gate_first: bool,
    shared: SharedSquares | None = None,
) -> Tensor:
    """Return the gated norm of x [T, W] float32; see `RecurrentKernels`."""
    num_rows, width = x.shape
    assert x.is_contiguous() and gate.stride(1) == 1, "the features of a row are contiguous"
    assert width % group_size == 0, "rows of whole groups"
    assert shared is None or group_size == width, "all ranks are one group"
    out = torch.empty((num_rows, width), dtype=dtype, device=x.device)
    if num_rows == 0:
        return out
    block = triton.next_power_of_2(group_size)
    _norm_group[(num_rows, width // group_size)](
        x,
        gate,
        None if shared is None else shared.sums,
        weight,
        out,
        gate.stride(0),
        eps,
        WIDTH=width,
        GROUP=group_size,
        ALL_WIDTH=group_size if shared is None else shared.width,
        GATE_FIRST=gate_first or weight is None,
        BLOCK=block,
        num_warps=_num_warps(block),
        **LAUNCH_OPTIONS,
    )
    return out


def _num_warps(block: int) -> int:
    return min(_MAX_WARPS, max(1, block // (32 * _ELEMENTS_OF_A_THREAD)))


@triton.jit
def _silu(gate_ptrs, mask):
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate))


@triton.jit
def _sum_row(
    x_ptr,
    gate_ptr,
    sums_ptr,
    gate_stride,
    WIDTH: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < WIDTH
    x = tl.load(x_ptr + row * WIDTH + at, mask=mask, other=0.0)
    if GATE_FIRST:
        x = x * _silu(gate_ptr + row * gate_stride + at, mask)
    tl.store(sums_ptr + row, tl.sum(x * x))


@triton.jit
def _norm_group(
    x_ptr,
    gate_ptr,
    sums_ptr,
    weight_ptr,
    out_ptr,
    gate_stride,
    eps,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    ALL_WIDTH: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    in_group = tl.arange(0, BLOCK)
    at, mask = tl.program_id(1) * GROUP + in_group, in_group < GROUP
    x = tl.load(x_ptr + row * WIDTH + at, mask=mask, other=0.0)
    gate = _silu(gate_ptr + row * gate_stride + at, mask)
    if GATE_FIRST:
        x = x * gate
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
        total = tl.load(sums_ptr + row) if sums_ptr is not None else tl.sum(x * x)
        x = x * tl.math.rsqrt(total / ALL_WIDTH + eps) * weight
    if not GATE_FIRST:
        x = x * gate
    tl.store(out_ptr + row * WIDTH + at, x.to(out_ptr.dtype.element_ty), mask=mask)
