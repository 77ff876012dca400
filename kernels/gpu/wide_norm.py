"""RMS norms of Q and K over all heads together (OLMo 2), of which each rank has some.

Two kernels: ranks add up the squares between them. A row's squares are added by one tile that spans
the heads, whatever stands around it.

Shapes: T rows, HQ / HK query and KV heads of this rank, D head_dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.constants import LAUNCH_OPTIONS

_ELEMENTS_OF_A_THREAD = 8  # 16 bytes of bfloat16
_MAX_WARPS = 16


def square_sums(qkv: Tensor, num_heads: int, num_kv_heads: int, *, counts_kv: bool) -> Tensor:
    """Return the squares of a row's query heads, and of its K heads, added up: [T, 2] float32.

    Args:
        qkv: [T, HQ + 2 HK, D] float32, float16 or bfloat16, the heads of a row contiguous.
        num_heads: HQ.
        num_kv_heads: HK.
        counts_kv: whether K is counted here; else its sum is 0.
    """
    num_rows, _, head_dim = qkv.shape
    assert qkv.stride(2) == 1 and qkv.stride(1) == head_dim, "the heads of a row are contiguous"
    sums = torch.empty((num_rows, 2), dtype=torch.float32, device=qkv.device)
    if num_rows == 0:
        return sums
    block = triton.next_power_of_2(num_heads * head_dim)
    _sum_row[(num_rows,)](
        qkv,
        sums,
        qkv.stride(0),
        Q=num_heads * head_dim,
        K=num_kv_heads * head_dim,
        COUNTS_KV=counts_kv,
        BLOCK_Q=block,
        BLOCK_K=triton.next_power_of_2(num_kv_heads * head_dim),
        num_warps=_num_warps(block),
        **LAUNCH_OPTIONS,
    )
    return sums


def wide_norm(
    qkv: Tensor,
    sums: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    widths: tuple[int, int],
    eps: float,
) -> None:
    """Norm the Q and the K of each row in place, by the squares of all ranks.

    Args:
        qkv: [T, HQ + 2 HK, D] float32, float16 or bfloat16, the heads of a row contiguous.
        sums: [T, 2] float32 contiguous, as `square_sums` has them, over all ranks.
        q_norm: [HQ D], the norm's weight.
        k_norm: [HK D], likewise.
        widths: features of Q and of K over all ranks.
        eps: added to the mean squares.
    """
    num_rows, _, head_dim = qkv.shape
    assert qkv.stride(2) == 1 and qkv.stride(1) == head_dim, "the heads of a row are contiguous"
    assert sums.dtype == torch.float32 and sums.is_contiguous()
    if num_rows == 0:
        return
    block = triton.next_power_of_2(q_norm.shape[0])
    _norm_row[(num_rows,)](
        qkv,
        sums,
        q_norm,
        k_norm,
        qkv.stride(0),
        eps,
        Q=q_norm.shape[0],
        K=k_norm.shape[0],
        ALL_Q=widths[0],
        ALL_K=widths[1],
        BLOCK_Q=block,
        BLOCK_K=triton.next_power_of_2(k_norm.shape[0]),
        num_warps=_num_warps(block),
        **LAUNCH_OPTIONS,
    )


def _num_warps(block: int) -> int:
    return min(_MAX_WARPS, max(1, block // (32 * _ELEMENTS_OF_A_THREAD)))


@triton.jit
def _sum_row(
    qkv_ptr,
    sums_ptr,
    row_stride,
    Q: tl.constexpr,
    K: tl.constexpr,
    COUNTS_KV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    qkv_ptr += row * row_stride
    at = tl.arange(0, BLOCK_Q)
    q = tl.load(qkv_ptr + at, mask=at < Q, other=0.0).to(tl.float32)
    tl.store(sums_ptr + row * 2, tl.sum(q * q))
    if COUNTS_KV:
        at_k = tl.arange(0, BLOCK_K)
        k = tl.load(qkv_ptr + Q + at_k, mask=at_k < K, other=0.0).to(tl.float32)
        tl.store(sums_ptr + row * 2 + 1, tl.sum(k * k))
    else:
        tl.store(sums_ptr + row * 2 + 1, 0.0)


@triton.jit
def _norm_row(
    qkv_ptr,
    sums_ptr,
    q_norm_ptr,
    k_norm_ptr,
    row_stride,
    eps,
    Q: tl.constexpr,
    K: tl.constexpr,
    ALL_Q: tl.constexpr,
    ALL_K: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    qkv_ptr += row * row_stride
    _norm_part(qkv_ptr, sums_ptr + row * 2, q_norm_ptr, eps, Q, ALL_Q, BLOCK_Q)
    _norm_part(qkv_ptr + Q, sums_ptr + row * 2 + 1, k_norm_ptr, eps, K, ALL_K, BLOCK_K)


@triton.jit
def _norm_part(
    x_ptr,
    sum_ptr,
    weight_ptr,
    eps,
    WIDTH: tl.constexpr,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    mask = at < WIDTH
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    normed = x * tl.math.rsqrt(tl.load(sum_ptr) / ALL + eps) * weight
    tl.store(x_ptr + at, normed.to(x_ptr.dtype.element_ty), mask=mask)
