"""The recurrence of gated delta nets on a GPU, row by row.

Shapes: T rows, HK key heads of DK features, HV value heads of DV, P state pages, S runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.batch_metadata import StateMetadata
from kernels.gpu.constants import LAUNCH_OPTIONS
from kernels.gpu.recurrent.softplus import softplus
from kernels.gpu.recurrent.tiles import block_columns
from kernels.recurrent.gated_delta_rule import LENGTH_EPS, num_key_heads
from kernels.recurrent.state_runs import check_states
from kernels.recurrent.weights import DeltaWeight

_LENGTH_EPS = tl.constexpr(LENGTH_EPS)


def gated_delta_rule(
    qkv: Tensor, a: Tensor, b: Tensor, weight: DeltaWeight, states: Tensor, rows: StateMetadata
) -> Tensor:
    """Return the outputs [T, HV DV] float32; see `RecurrentKernels`.

    Grid: runs, value heads, blocks of a head's features. A program keeps its columns of the state
    in registers from the run's first row to its last; their sums over keys are one warp's.
    """
    check_states(states)
    _, num_heads, key_dim, value_dim = states.shape
    assert qkv.stride(1) == a.stride(1) == b.stride(1) == 1, "the features of a row are contiguous"
    shape = qkv.shape[0], num_heads * value_dim
    out = torch.empty(shape, dtype=torch.float32, device=qkv.device)
    if qkv.shape[0] == 0:
        return out
    block_v = block_columns(key_dim, value_dim)
    _mend[(rows.runs.shape[0], num_heads, triton.cdiv(value_dim, block_v))](
        qkv,
        a,
        b,
        weight.a,
        weight.dt_bias,
        states,
        out,
        rows.runs,
        qkv.stride(0),
        a.stride(0),
        b.stride(0),
        states.stride(0),
        key_dim**-0.5,
        KEY_HEADS=num_key_heads(qkv, states),
        HEADS=num_heads,
        K=key_dim,
        V=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=block_v,
        num_warps=1,
        **LAUNCH_OPTIONS,
    )
    return out


@triton.jit
def _unit(x):
    """Return x divided by its length."""
    return x * tl.math.rsqrt(tl.sum(x * x, 0) + _LENGTH_EPS)


@triton.jit
def _mend(
    qkv_ptr,
    a_ptr,
    b_ptr,
    decay_ptr,
    dt_bias_ptr,
    states_ptr,
    out_ptr,
    runs_ptr,
    qkv_stride,
    a_stride,
    b_stride,
    page_stride,
    q_factor,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    run, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(runs_ptr + 4 * run).to(tl.int64)
    end = tl.load(runs_ptr + 4 * run + 1).to(tl.int64)
    if first >= end:
        return
    page = tl.load(runs_ptr + 4 * run + 2).to(tl.int64)
    is_new = tl.load(runs_ptr + 4 * run + 3)
    k_ids = tl.arange(0, BLOCK_K)
    v_ids = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_k, is_v = k_ids < K, v_ids < V
    mask = is_k[:, None] & is_v[None, :]
    states_ptr += page * page_stride + head * K * V
    states_ptrs = states_ptr + k_ids[:, None] * V + v_ids[None, :]
    is_kept = is_new + tl.zeros(mask.shape, tl.int32) == 0
    state = tl.load(states_ptrs, mask=mask & is_kept, other=0.0)
    decay_rate, dt_bias = tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head)
    q_at = qkv_ptr + (head * KEY_HEADS // HEADS) * K + k_ids
    v_at = qkv_ptr + 2 * KEY_HEADS * K + head * V + v_ids
    for row in range(first, end):
        q = tl.load(q_at + row * qkv_stride, mask=is_k, other=0.0).to(tl.float32)
        k = tl.load(q_at + row * qkv_stride + KEY_HEADS * K, mask=is_k, other=0.0).to(tl.float32)
        v = tl.load(v_at + row * qkv_stride, mask=is_v, other=0.0).to(tl.float32)
        step = softplus(tl.load(a_ptr + row * a_stride + head).to(tl.float32) + dt_bias)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(b_ptr + row * b_stride + head).to(tl.float32)))
        q, k = _unit(q) * q_factor, _unit(k)
        state = state * tl.exp(step * decay_rate)
        error = (v - tl.sum(state * k[:, None], 0)) * beta
        state += k[:, None] * error[None, :]
        y = tl.sum(state * q[:, None], 0)
        tl.store(out_ptr + row * (HEADS * V) + head * V + v_ids, y, mask=is_v)
    tl.store(states_ptrs, state, mask=mask)
