"""RMS norm of rows, with the sum that precedes it in every block.

A row's squares are added by one tile that spans the row, whatever stands around it.

Shapes: T rows, H hidden.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.elementwise import result_dtype
from kernels.gpu.dependent_launch import dependent_options, start_dependents, wait_for_prior

_ELEMENTS_OF_A_THREAD = 8  # 16 bytes of bfloat16
_MAX_WARPS = 16


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (total / rms(total) * weight, total) with total = x + residual in float32.

    One program for each row, as in Liger's norm; rounded once, when the normed row is stored.

    Args:
        x: [T, H] float32, float16 or bfloat16, whatever weight's dtype; rows may be strided.
        residual: [T, H] float32, contiguous; None counts as 0.
        weight: [H]; None: the sum is rounded, and that is all.
        eps: added to the mean square.
        dtype: of the normed rows; None: weight's.

    Returns:
        The normed rows [T, H], and the new residual [T, H] in float32.
    """
    assert residual is None or (residual.dtype == torch.float32 and residual.is_contiguous())
    total = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    out = torch.empty(x.shape, dtype=result_dtype(weight, dtype), device=x.device)
    _norm(x, residual, weight, total, out, eps)
    return out, total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight [T, H] in x's dtype; the arguments are those of the other."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, None, weight, None, out, eps)
    return out


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    total: Tensor | None,
    out: Tensor,
    eps: float,
) -> None:
    num_rows, hidden = x.shape
    assert x.stride(1) == 1, "the features of a row are contiguous"
    assert weight is None or (weight.shape == (hidden,) and weight.is_contiguous())
    if num_rows == 0:
        return
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
        **dependent_options(),
    )


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
    start_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < HIDDEN
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    wait_for_prior()
    total = tl.load(x_ptr + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + row * HIDDEN + at, mask=mask, other=0.0)
    if total_ptr is not None:
        tl.store(total_ptr + row * HIDDEN + at, total, mask=mask)
    normed = total
    if weight_ptr is not None:
        scale = tl.math.rsqrt(tl.sum(total * total) / HIDDEN + eps)
        normed = total * scale * weight
    tl.store(out_ptr + row * HIDDEN + at, normed.to(out_ptr.dtype.element_ty), mask=mask)
