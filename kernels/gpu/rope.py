"""From one row of qkv to a rotated q and to K and V in their pages.

Heads may have a norm before the rotation (Qwen3). The result rounds once, from float32.

Shapes: T rows, HQ / HK query and KV heads, D head_dim of which R features rotate, P pages.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.constants import LAUNCH_OPTIONS
from kernels.gpu.dependent_launch import dependent_options, start_dependents, wait_for_prior

# One warp whose threads hold 8 elements of either half of a head: 16 bytes of bfloat16 each.
_ELEMENTS_OF_A_PROGRAM = 512
# Programs of more rows than these are too many to run at once, and too small to wait for what is
# before them one by one: of 2,048 rows, that took 30 us in place of 17.
_FEW_ROWS = 256


def rope_and_write(
    qkv: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv_loc: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """Return rotated q; write rotated k, and v as it is, where kv_loc says.

    Each pair (a, b) of elements i and i + R/2 of a q or k head becomes
    (a cos - b sin, b cos + a sin), the "neox" layout; elements from R on stay. The grid
    is rows times groups of heads, and a group holds heads of one kind, so that what is done with
    them is decided once.

    Args:
        qkv: [T, HQ + 2 HK, D] float32, float16 or bfloat16; q heads, then k, then v.
        num_heads: HQ.
        cos: [max_position, R/2] float32, contiguous, as is `sin`.
        sin: [max_position, R/2] float32.
        positions: [T] int64.
        kv_loc: [T] int64, page * page_size + offset; -1 writes nothing for this row.
        k_pages: [P, HK, page, D], qkv's dtype, changed in place.
        v_pages: [P, HK, page, D], likewise.
        q_norm: [D], weight of the norm of each q head before it is rotated, or None.
        k_norm: [D], likewise for k; both or none.
        eps: added to the mean squares.

    Returns:
        [T, HQ, D], contiguous, in qkv's dtype.
    """
    num_rows, num_all, head_dim = qkv.shape
    _, num_kv_heads, page_size, _ = k_pages.shape
    assert num_all == num_heads + 2 * num_kv_heads, "qkv holds q, k and v heads"
    assert qkv.stride(2) == 1 and qkv.stride(1) == head_dim, "the heads of a row are contiguous"
    assert k_pages.is_contiguous() and v_pages.is_contiguous() and k_pages.dtype == qkv.dtype
    assert 2 * cos.shape[1] <= head_dim and cos.shape == sin.shape
    assert cos.is_contiguous() and sin.is_contiguous() and cos.dtype == torch.float32
    assert (q_norm is None) == (k_norm is None), "norms of q and k come together"
    q = torch.empty((num_rows, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_rows == 0:
        return q
    are_few = num_rows <= _FEW_ROWS
    half_block = triton.next_power_of_2(head_dim // 2)
    group = max(1, _ELEMENTS_OF_A_PROGRAM // (2 * half_block))
    num_groups = triton.cdiv(num_heads, group) + 2 * triton.cdiv(num_kv_heads, group)
    _rotate_group[(num_rows, num_groups)](
        qkv,
        cos,
        sin,
        positions,
        kv_loc,
        q,
        k_pages,
        v_pages,
        q_norm,
        k_norm,
        qkv.stride(0),
        eps,
        HQ=num_heads,
        HK=num_kv_heads,
        PAGE=page_size,
        HALF=head_dim // 2,
        HALF_BLOCK=half_block,
        TURNED=cos.shape[1],
        GROUP=group,
        IS_DEPENDENT=are_few,
        num_warps=1,
        **(dependent_options() if are_few else LAUNCH_OPTIONS),
    )
    return q


@triton.jit
def _rotate_group(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    kv_loc_ptr,
    q_ptr,
    k_pages_ptr,
    v_pages_ptr,
    q_norm_ptr,
    k_norm_ptr,
    row_stride,
    eps,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    TURNED: tl.constexpr,
    GROUP: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    Q_GROUPS: tl.constexpr = (HQ + GROUP - 1) // GROUP
    K_GROUPS: tl.constexpr = (HK + GROUP - 1) // GROUP
    IN_PAGE: tl.constexpr = PAGE * 2 * HALF
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions_ptr + row)
    if IS_DEPENDENT:
        start_dependents()
        wait_for_prior()
    heads = qkv_ptr + row * row_stride
    if group < Q_GROUPS:
        at, mask = _head_offsets(group, HQ, 2 * HALF, HALF, HALF_BLOCK, GROUP)
        first, second = _load_halves(heads, at, mask, HALF, HALF_BLOCK, TURNED)
        if q_norm_ptr is not None:
            first, second = _norm_heads(first, second, q_norm_ptr, eps, HALF, HALF_BLOCK, TURNED)
        first, second = _rotate(first, second, cos_ptr, sin_ptr, position, HALF_BLOCK, TURNED)
        q_ptr += row * (HQ * 2 * HALF)
        _store_halves(q_ptr, at, first, second, mask, HALF, HALF_BLOCK, TURNED)
    else:
        loc = tl.load(kv_loc_ptr + row)
        if loc >= 0:
            # Position `offset` of head 0 of the page; heads lie PAGE positions apart.
            start = (loc // PAGE * HK * PAGE + loc % PAGE) * (2 * HALF)
            if group < Q_GROUPS + K_GROUPS:
                group -= Q_GROUPS
                at, mask = _head_offsets(group, HK, 2 * HALF, HALF, HALF_BLOCK, GROUP)
                heads += HQ * 2 * HALF
                first, second = _load_halves(heads, at, mask, HALF, HALF_BLOCK, TURNED)
                if k_norm_ptr is not None:
                    first, second = _norm_heads(
                        first, second, k_norm_ptr, eps, HALF, HALF_BLOCK, TURNED
                    )
                first, second = _rotate(
                    first, second, cos_ptr, sin_ptr, position, HALF_BLOCK, TURNED
                )
                at, mask = _head_offsets(group, HK, IN_PAGE, HALF, HALF_BLOCK, GROUP)
                k_pages_ptr += start
                _store_halves(k_pages_ptr, at, first, second, mask, HALF, HALF_BLOCK, TURNED)
            else:
                group -= Q_GROUPS + K_GROUPS
                at, mask = _head_offsets(group, HK, 2 * HALF, HALF, HALF_BLOCK, GROUP)
                heads += (HQ + HK) * 2 * HALF
                first, second = _load_halves(heads, at, mask, HALF, HALF_BLOCK, TURNED)
                at, mask = _head_offsets(group, HK, IN_PAGE, HALF, HALF_BLOCK, GROUP)
                v_pages_ptr += start
                _store_halves(v_pages_ptr, at, first, second, mask, HALF, HALF_BLOCK, TURNED)


@triton.jit
def _head_offsets(
    group,
    NUM_HEADS: tl.constexpr,
    STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return where the group's heads lie [GROUP, 1], and what of a half of them exists."""
    head, at = group * GROUP + tl.arange(0, GROUP)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
    return head * STRIDE, (head < NUM_HEADS) & (at < HALF)


@triton.jit
def _halves(HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, TURNED: tl.constexpr):
    """Return which elements of a head are its first half, and which stand opposite them.

    Those that rotate are pairs (i, i + TURNED); behind them what does not is halved likewise.
    """
    at = tl.arange(0, HALF_BLOCK)
    first, second = at, at + HALF
    if TURNED < HALF:
        first = tl.where(at < TURNED, at, at + TURNED)
        second = tl.where(at < TURNED, at + TURNED, at + HALF)
    return first, second


@triton.jit
def _load_halves(
    base, at, mask, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, TURNED: tl.constexpr
):
    i, j = _halves(HALF, HALF_BLOCK, TURNED)
    first = tl.load(base + at + i[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(base + at + j[None, :], mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_halves(
    base,
    at,
    first,
    second,
    mask,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    TURNED: tl.constexpr,
):
    i, j = _halves(HALF, HALF_BLOCK, TURNED)
    tl.store(base + at + i[None, :], first.to(base.dtype.element_ty), mask=mask)
    tl.store(base + at + j[None, :], second.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _norm_heads(
    first,
    second,
    weight_ptr,
    eps,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    TURNED: tl.constexpr,
):
    i, j = _halves(HALF, HALF_BLOCK, TURNED)
    mask = tl.arange(0, HALF_BLOCK) < HALF
    squares = tl.sum(first * first + second * second, axis=1) / (2 * HALF)
    scale = tl.math.rsqrt(squares + eps)[:, None]
    weight_1 = tl.load(weight_ptr + i, mask=mask, other=0.0).to(tl.float32)
    weight_2 = tl.load(weight_ptr + j, mask=mask, other=0.0).to(tl.float32)
    return first * scale * weight_1[None, :], second * scale * weight_2[None, :]


@triton.jit
def _rotate(
    first, second, cos_ptr, sin_ptr, position, HALF_BLOCK: tl.constexpr, TURNED: tl.constexpr
):
    at = tl.arange(0, HALF_BLOCK)
    cos = tl.load(cos_ptr + position * TURNED + at, mask=at < TURNED, other=1.0)[None, :]
    sin = tl.load(sin_ptr + position * TURNED + at, mask=at < TURNED, other=0.0)[None, :]
    return first * cos - second * sin, second * cos + first * sin
