"""Mamba-2's recurrence on a GPU, row by row.

Shapes: T rows, H heads of D features, G groups of N state features, P state pages, S runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.batch_metadata import StateMetadata
from kernels.gpu.constants import LAUNCH_OPTIONS
from kernels.gpu.recurrent.softplus import softplus
from kernels.gpu.recurrent.tiles import block_columns
from kernels.recurrent.selective_scan import num_groups
from kernels.recurrent.state_runs import check_states
from kernels.recurrent.weights import ScanWeight


def selective_scan(
    xbc: Tensor, dt: Tensor, weight: ScanWeight, states: Tensor, rows: StateMetadata
) -> Tensor:
    """Return the outputs [T, H D] float32; see `RecurrentKernels`.

    Grid: runs, heads, blocks of a head's features. A program keeps its columns of the state in
    registers from the run's first row to its last; their sums over the state are one warp's.
    """
    check_states(states)
    _, num_heads, state_size, head_dim = states.shape
    assert xbc.stride(1) == dt.stride(1) == 1, "the features of a row are contiguous"
    inner, device = num_heads * head_dim, xbc.device
    out = torch.empty((xbc.shape[0], inner), dtype=torch.float32, device=device)
    if xbc.shape[0] == 0:
        return out
    block_d = block_columns(state_size, head_dim)
    _scan[(rows.runs.shape[0], num_heads, triton.cdiv(head_dim, block_d))](
        xbc,
        dt,
        weight.a,
        weight.dt_bias,
        weight.d,
        states,
        out,
        rows.runs,
        xbc.stride(0),
        dt.stride(0),
        states.stride(0),
        *weight.dt_limit,
        HEADS=num_heads,
        GROUPS=num_groups(xbc, states),
        N=state_size,
        D=head_dim,
        BLOCK_N=triton.next_power_of_2(state_size),
        BLOCK_D=block_d,
        num_warps=1,
        **LAUNCH_OPTIONS,
    )
    return out


@triton.jit
def _scan(
    xbc_ptr,
    dt_ptr,
    a_ptr,
    dt_bias_ptr,
    d_ptr,
    states_ptr,
    out_ptr,
    runs_ptr,
    xbc_stride,
    dt_stride,
    page_stride,
    dt_min,
    dt_max,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    run, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(runs_ptr + 4 * run).to(tl.int64)
    end = tl.load(runs_ptr + 4 * run + 1).to(tl.int64)
    if first >= end:
        return
    page = tl.load(runs_ptr + 4 * run + 2).to(tl.int64)
    is_new = tl.load(runs_ptr + 4 * run + 3)
    n = tl.arange(0, BLOCK_N)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_n, is_d = n < N, d < D
    mask = is_n[:, None] & is_d[None, :]
    states_ptr += page * page_stride + head * N * D
    states_ptrs = states_ptr + n[:, None] * D + d[None, :]
    is_kept = is_new + tl.zeros(mask.shape, tl.int32) == 0
    state = tl.load(states_ptrs, mask=mask & is_kept, other=0.0)
    a, dt_bias = tl.load(a_ptr + head), tl.load(dt_bias_ptr + head)
    skip = tl.load(d_ptr + head)
    group = head * GROUPS // HEADS
    x_at = xbc_ptr + head * D + d
    b_at = xbc_ptr + HEADS * D + group * N + n
    for row in range(first, end):
        x = tl.load(x_at + row * xbc_stride, mask=is_d, other=0.0).to(tl.float32)
        b = tl.load(b_at + row * xbc_stride, mask=is_n, other=0.0).to(tl.float32)
        c = tl.load(b_at + row * xbc_stride + GROUPS * N, mask=is_n, other=0.0).to(tl.float32)
        step = softplus(tl.load(dt_ptr + row * dt_stride + head).to(tl.float32) + dt_bias)
        step = tl.where(step < dt_min, dt_min, step)
        step = tl.where(step > dt_max, dt_max, step)
        state = state * tl.exp(step * a) + b[:, None] * (x * step)[None, :]
        y = tl.sum(state * c[:, None], 0) + x * skip
        tl.store(out_ptr + row * (HEADS * D) + head * D + d, y, mask=is_d)
    tl.store(states_ptrs, state, mask=mask)
