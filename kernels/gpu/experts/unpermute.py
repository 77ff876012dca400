"""The weighted sum of a row's experts on a GPU.

Shapes: T rows, k experts of a row, P = T k pairs, N outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts import RoutedRows
from kernels.gpu.constants import LAUNCH_OPTIONS

_BLOCK = 512


def unpermute(
    y: Tensor, routed: RoutedRows, start: Tensor | None = None, gates: Tensor | None = None
) -> Tensor:
    """Return the sum of each row's pairs times their weights, without those of other ranks.

    In float32, from a row's best expert to its last, one fused multiply-add after the other;
    rounded once. The grid is rows times pieces of a row, which have no part in the bits.

    Args:
        y: [P, N] float32, float16 or bfloat16, contiguous.
        routed: of the same rows.
        start: [T, N], likewise, what the sum starts with; None: nothing.
        gates: [T, 1] of a float dtype, whose sigmoid that is multiplied by before; None: 1.

    Returns:
        [T, N] in the dtype of `start`, or of y.
    """
    (num_rows, top_k), width = routed.positions.shape, y.shape[1]
    assert y.is_contiguous() and (start is None or start.is_contiguous()), "contiguous rows"
    dtype = y.dtype if start is None else start.dtype
    out = torch.empty(num_rows, width, dtype=dtype, device=y.device)
    if num_rows > 0:
        _sum_piece[(num_rows, triton.cdiv(width, _BLOCK))](
            y,
            routed.weights,
            routed.positions,
            routed.starts[-1:],
            start,
            gates,
            out,
            0 if gates is None else gates.stride(0),
            HAS_START=start is not None,
            HAS_GATES=gates is not None,
            TOP_K=top_k,
            WIDTH=width,
            BLOCK=_BLOCK,
            num_warps=2,
            **LAUNCH_OPTIONS,
        )
    return out


@triton.jit
def _sum_piece(
    y_ptr,
    weights_ptr,
    positions_ptr,
    end_ptr,
    start_ptr,
    gates_ptr,
    out_ptr,
    gate_stride,
    HAS_START: tl.constexpr,
    HAS_GATES: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    end = tl.load(end_ptr)
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_START:
        total = tl.load(start_ptr + row * WIDTH + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_GATES:
        gate = tl.load(gates_ptr + row * gate_stride).to(tl.float32)
        total = total / (1.0 + tl.exp(-gate))
    for slot in tl.static_range(TOP_K):
        pair = tl.load(positions_ptr + row * TOP_K + slot).to(tl.int64)
        weight = tl.load(weights_ptr + row * TOP_K + slot)
        is_own = pair + tl.zeros((BLOCK,), tl.int64) < end
        y = tl.load(y_ptr + pair * WIDTH + at, mask=mask & is_own, other=0.0).to(tl.float32)
        total = tl.where(is_own, tl.fma(y, tl.zeros_like(y) + weight, total), total)
    tl.store(out_ptr + row * WIDTH + at, total.to(out_ptr.dtype.element_ty), mask=mask)
