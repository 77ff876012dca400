"""RMS norm of rows, with the sum that precedes it in every block.

A row's squares are added by one tile that spans the row, whatever stands around it.

Shapes: T rows, H hidden.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.constants import LAUNCH_OPTIONS

_ELEMENTS_OF_A_THREAD = 8  # 16 bytes of bfloat16
_MAX_WARPS = 16


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (total / rms(total) * weight, total) with total = x + residual in float32.

    One program for each row, as in Liger's norm; rounded once, when the normed row is stored.

    Args:
        x: [T, H] float32, float16 or bfloat16, whatever weight's dtype; rows may be strided.
        residual: [T, H] float32, contiguous; None counts as 0.
        weight: [H].
        eps: added to the mean square.

    Returns:
        The normed rows [T, H] in weight's dtype, and the new residual [T, H] in float32.
    """
    num_rows, hidden = x.shape
    assert residual is None or (residual.dtype == torch.float32 and residual.is_contiguous())
    assert x.stride(1) == 1 and weight.shape == (hidden,) and weight.is_contiguous()
    total = torch.empty((num_rows, hidden), dtype=torch.float32, device=x.device)
    out = torch.empty((num_rows, hidden), dtype=weight.dtype, device=x.device)
    if num_rows == 0:
        return out, total
    block = triton.next_power_of_2(hidden)
    num_warps = min(_MAX_WARPS, max(1, block // (32 * _ELEMENTS_OF_A_THREAD)))
    _norm_row[(num_rows,)](
        x,
        residual,
        weight,
        total,
        out,
        x.stride(0),
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        num_warps=num_warps,
        **LAUNCH_OPTIONS,
    )
    return out, total


@triton.jit
def _norm_row(
    x_ptr,
    residual_ptr,
    weight_ptr,
    total_ptr,
    out_ptr,
    x_stride,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < HIDDEN
    total = tl.load(x_ptr + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + row * HIDDEN + at, mask=mask, other=0.0)
    tl.store(total_ptr + row * HIDDEN + at, total, mask=mask)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(total * total) / HIDDEN + eps)
    normed = total * scale * weight
    tl.store(out_ptr + row * HIDDEN + at, normed.to(out_ptr.dtype.element_ty), mask=mask)
