"""Depthwise causal convolutions of a few taps on a GPU.

Two kernels: one computes all rows at once, the other then keeps the last inputs of each run, for a
run's first rows read the state that its last rows replace.

Shapes: T rows, C channels, K taps, P state pages, S runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.batch_metadata import StateMetadata
from kernels.gpu.constants import LAUNCH_OPTIONS
from kernels.recurrent.state_runs import check_states
from kernels.recurrent.weights import ConvWeight

_BLOCK = 256


def causal_conv(
    x: Tensor, weight: ConvWeight, states: Tensor, rows: StateMetadata, *, has_silu: bool
) -> Tensor:
    """Return the convolution of x [T, C], through SiLU or not; see `RecurrentKernels`."""
    return _convolve(x, weight, states, rows, x.dtype, has_gates=False, has_silu=has_silu)


def short_conv(
    bcx: Tensor, weight: ConvWeight, states: Tensor, rows: StateMetadata, dtype: torch.dtype
) -> Tensor:
    """Return LFM2's gated convolution of bcx [T, 3C]; see `RecurrentKernels`."""
    return _convolve(bcx, weight, states, rows, dtype, has_gates=True, has_silu=False)


def _convolve(
    x: Tensor,
    weight: ConvWeight,
    states: Tensor,
    rows: StateMetadata,
    dtype: torch.dtype,
    *,
    has_gates: bool,
    has_silu: bool,
) -> Tensor:
    check_states(states)
    (num_rows, width), (num_taps, num_channels) = x.shape, weight.taps.shape
    assert width == num_channels * (3 if has_gates else 1), "inputs of all channels"
    assert states.shape[1:] == (num_taps - 1, num_channels), "the last inputs of all channels"
    assert x.stride(1) == 1, "the channels of a row are contiguous"
    out = torch.empty((num_rows, num_channels), dtype=dtype, device=x.device)
    if num_rows == 0:
        return out
    num_blocks = triton.cdiv(num_channels, _BLOCK)
    arguments = x, states, rows.runs, x.stride(0), states.stride(0)
    options = {
        "CHANNELS": num_channels,
        "TAPS": num_taps,
        "HAS_GATES": has_gates,
        "BLOCK": _BLOCK,
        "num_warps": 2,
        **LAUNCH_OPTIONS,
    }
    _convolve_piece[(num_rows, num_blocks)](
        *arguments, weight.taps, weight.bias, out, rows.row_runs, HAS_SILU=has_silu, **options
    )
    _keep_inputs[(rows.runs.shape[0], num_blocks)](*arguments, **options)
    return out


@triton.jit
def _input(
    x_ptr,
    state_ptr,
    row,
    first,
    is_new,
    x_stride,
    at,
    mask,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_GATES: tl.constexpr,
):
    """Return the inputs of a row: those before a run's first are in its state, or zero."""
    is_before = row + tl.zeros_like(at) < first
    own = mask & (row + tl.zeros_like(at) >= first)
    x_at = x_ptr + row * x_stride + at
    x = tl.load(x_at, mask=own, other=0.0).to(tl.float32)
    if HAS_GATES:
        x = tl.load(x_at + 2 * CHANNELS, mask=own, other=0.0).to(tl.float32) * x
    kept = mask & is_before & (is_new + tl.zeros_like(at) == 0)
    before = tl.load(state_ptr + (row - first + TAPS - 1) * CHANNELS + at, mask=kept, other=0.0)
    return tl.where(is_before, before, x)


@triton.jit
def _convolve_piece(
    x_ptr,
    states_ptr,
    runs_ptr,
    x_stride,
    page_stride,
    taps_ptr,
    bias_ptr,
    out_ptr,
    row_runs_ptr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_GATES: tl.constexpr,
    HAS_SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    run = tl.load(row_runs_ptr + row)
    if run < 0:
        return
    first = tl.load(runs_ptr + 4 * run)
    page = tl.load(runs_ptr + 4 * run + 2).to(tl.int64)
    is_new = tl.load(runs_ptr + 4 * run + 3)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < CHANNELS
    total = tl.zeros((BLOCK,), tl.float32)
    if bias_ptr is not None:
        total = tl.load(bias_ptr + at, mask=mask, other=0.0)
    state_ptr = states_ptr + page * page_stride
    for tap in tl.static_range(TAPS):
        x = _input(
            x_ptr,
            state_ptr,
            row - (TAPS - 1 - tap),
            first,
            is_new,
            x_stride,
            at,
            mask,
            CHANNELS,
            TAPS,
            HAS_GATES,
        )
        weight = tl.load(taps_ptr + tap * CHANNELS + at, mask=mask, other=0.0)
        total = tl.fma(x, weight, total)
    if HAS_SILU:
        total = total / (1.0 + tl.exp(-total))
    if HAS_GATES:
        gate = tl.load(x_ptr + row * x_stride + CHANNELS + at, mask=mask, other=0.0)
        total = total * gate.to(tl.float32)
    tl.store(out_ptr + row * CHANNELS + at, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _keep_inputs(
    x_ptr,
    states_ptr,
    runs_ptr,
    x_stride,
    page_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_GATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    run = tl.program_id(0)
    first = tl.load(runs_ptr + 4 * run)
    end = tl.load(runs_ptr + 4 * run + 1).to(tl.int64)
    if first >= end:
        return
    page = tl.load(runs_ptr + 4 * run + 2).to(tl.int64)
    is_new = tl.load(runs_ptr + 4 * run + 3)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < CHANNELS
    state_ptr = states_ptr + page * page_stride
    # From the oldest: a kept input moves down, to where one was read before.
    for i in tl.static_range(TAPS - 1):
        x = _input(
            x_ptr,
            state_ptr,
            end - (TAPS - 1 - i),
            first,
            is_new,
            x_stride,
            at,
            mask,
            CHANNELS,
            TAPS,
            HAS_GATES,
        )
        tl.store(state_ptr + i * CHANNELS + at, x, mask=mask)
