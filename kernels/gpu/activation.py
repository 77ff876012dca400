"""The gated activations of the MLP, and the gate behind attention.

They round once, behind the product.

Shapes: T rows, I intermediate.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.dependent_launch import dependent_options, start_dependents, wait_for_prior

_ELEMENTS_OF_A_THREAD = 8  # 16 bytes of bfloat16


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return gate * sigmoid(gate) * up, computed in float32.

    Args:
        gate_up: [T, 2I] float32, float16 or bfloat16, the gate first; rows may be strided.

    Returns:
        [T, I] in gate_up's dtype.
    """
    return _gate_and_mul(gate_up, "silu")


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up by the approximation with tanh; likewise."""
    return _gate_and_mul(gate_up, "gelu_tanh")


def swigluoai_and_mul(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return gate * sigmoid(alpha gate) * (up + 1); likewise.

    The gate is cut to at most `limit` before, and up to between -limit and limit.
    """
    return _gate_and_mul(gate_up, "swigluoai", alpha, limit)


def gate_heads(x: Tensor, gates: Tensor) -> None:
    """Multiply what attention returned by the sigmoid of its gates, in place.

    Args:
        x: [T, HQ, D] float32, float16 or bfloat16, contiguous; changed.
        gates: [T, HQ D] of the same dtype; rows may be strided.
    """
    num_rows, width = gates.shape
    assert x.is_contiguous() and x.shape[0] == num_rows and x.dtype == gates.dtype
    assert x.numel() == gates.numel() and gates.stride(1) == 1
    if num_rows == 0:
        return
    block = _block(width)
    _gate_heads_piece[(num_rows, triton.cdiv(width, block))](
        x,
        gates,
        gates.stride(0),
        WIDTH=width,
        BLOCK=block,
        num_warps=block // (32 * _ELEMENTS_OF_A_THREAD),
        **dependent_options(),
    )


def _gate_and_mul(gate_up: Tensor, kind: str, alpha: float = 1.0, limit: float = 0.0) -> Tensor:
    """Return the gated rows.

    The grid is rows times pieces of a row; elements do not meet, so pieces have no part in the
    bits.
    """
    num_rows, width = gate_up.shape
    assert width % 2 == 0 and gate_up.stride(1) == 1
    intermediate = width // 2
    out = torch.empty((num_rows, intermediate), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows == 0:
        return out
    block = _block(intermediate)
    _gate_piece[(num_rows, triton.cdiv(intermediate, block))](
        gate_up,
        out,
        gate_up.stride(0),
        INTERMEDIATE=intermediate,
        BLOCK=block,
        KIND=kind,
        ALPHA=alpha,
        LIMIT=limit,
        num_warps=block // (32 * _ELEMENTS_OF_A_THREAD),
        **dependent_options(),
    )
    return out


def _block(width: int) -> int:
    """Return how many elements of a row one program takes."""
    # Widths of 512 * odd, as SmolLM2's 1536, would leave half of the last wide piece idle.
    return 1024 if width % 1024 == 0 else 512


@triton.jit
def _gate_heads_piece(x_ptr, gates_ptr, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    start_dependents()
    wait_for_prior()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    x_at = x_ptr + row * WIDTH + at
    x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gates_ptr + row * stride + at, mask=mask, other=0.0).to(tl.float32)
    product = x / (1.0 + tl.exp(-gate))
    tl.store(x_at, product.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gate_piece(
    gate_up_ptr,
    out_ptr,
    stride,
    INTERMEDIATE: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    start_dependents()
    wait_for_prior()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < INTERMEDIATE
    gate_at = gate_up_ptr + row * stride + at
    gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_at + INTERMEDIATE, mask=mask, other=0.0).to(tl.float32)
    z = gate
    if KIND == "swigluoai":  # not by minima and maxima, which may lose a NaN
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, up)
        up = tl.where(up < -LIMIT, -LIMIT, up) + 1.0
        z = gate * ALPHA
    if KIND == "gelu_tanh":  # (1 + tanh(z / 2)) / 2 = 1 / (1 + exp(-z))
        z = (gate + gate * gate * gate * 0.044715) * 1.5957691216057308  # 2 sqrt(2 / pi)
    product = gate / (1.0 + tl.exp(-z)) * up
    tl.store(out_ptr + row * INTERMEDIATE + at, product.to(out_ptr.dtype.element_ty), mask=mask)
