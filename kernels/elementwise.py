"""The small ops between the matrix products: norms, gated activations and rotary embedding.

Shapes: T rows, H hidden, I intermediate, HQ / HK query and KV heads of this rank, D head_dim of
which R features rotate.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

GatedActivation = Literal["silu", "gelu_tanh"]

# torch's scalar exp rounds otherwise than its vector exp, and runs on what is left over when whole
# vectors (32 elements, unrolled AVX-512) are done: at the end of a tensor, and of each thread's
# part where it deals a tensor of 32768 elements or more to threads.
_VECTOR = 32
_SERIAL_ELEMENTS = 32767


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Return x / rms(x) * weight over the last axis, in `dtype`.

    Computes in float32 and rounds once; Hugging Face rounds before the weight as well.

    Args:
        x: [..., H] float32 or bfloat16.
        weight: [H].
        eps: added to the mean square.
        dtype: of the result; None: weight's.
    """
    x32 = x.float()
    scale = x32.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x32 * scale).mul_(weight).to(result_dtype(weight, dtype))


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual).

    The sum stays in float32 from layer to layer: rounding it to bfloat16 in each of them makes
    twice the error in the logits (SmolLM2-135M: 0.17 against 0.08 root mean square).

    Args:
        x: [T, H], the output of a block.
        residual: [T, H] float32; None: 0.
        weight: [H]; None: the sum is rounded, and that is all.
        eps: added to the mean square.
        dtype: of the normed rows; None: weight's.

    Returns:
        The normed rows, and the new residual in float32.
    """
    total = x.float() if residual is None else residual + x
    dtype = result_dtype(weight, dtype)
    return total.to(dtype) if weight is None else rms_norm(total, weight, eps, dtype), total


def result_dtype(weight: Tensor | None, dtype: torch.dtype | None) -> torch.dtype:
    """Return what a norm's result is rounded to."""
    if dtype is not None:
        return dtype
    assert weight is not None, "without a weight it must be said"
    return weight.dtype


def square_sums(qkv: Tensor, num_heads: int, num_kv_heads: int, *, counts_kv: bool) -> Tensor:
    """Return the squares of all query heads, and of all K heads, added up: [T, 2] float32.

    Args:
        qkv: [T, HQ + 2 HK, D], any dtype.
        num_heads: HQ.
        num_kv_heads: HK.
        counts_kv: whether K is counted here; else its sum is 0.
    """
    q, k, _ = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    sums = torch.zeros(qkv.shape[0], 2, device=qkv.device)
    sums[:, 0] = q.float().flatten(1).square().sum(-1)
    if counts_kv:
        sums[:, 1] = k.float().flatten(1).square().sum(-1)
    return sums


def wide_norm(
    qkv: Tensor, sums: Tensor, q_norm: Tensor, k_norm: Tensor, widths: tuple[int, int], eps: float
) -> None:
    """Norm Q and K of qkv [T, HQ + 2 HK, D] over all heads of all ranks, in place.

    Args:
        qkv: changed.
        sums: [T, 2], as `square_sums` has them, over all ranks.
        q_norm: [HQ D], the norm's weight.
        k_norm: [HK D], likewise.
        widths: features of Q and of K over all ranks.
        eps: added to the mean squares.
    """
    flat, end = qkv.flatten(1), 0
    for index, weight in enumerate((q_norm, k_norm)):
        start, end = end, end + len(weight)
        scale = (sums[:, index : index + 1] / widths[index] + eps).rsqrt_()
        flat[:, start:end] = (flat[:, start:end].float() * scale).mul_(weight).to(qkv.dtype)


def gate_heads(x: Tensor, gates: Tensor) -> None:
    """Multiply x [T, HQ, D] by sigmoid(gates) in place, computed in float32.

    Args:
        x: changed.
        gates: [T, HQ D], any dtype; rows may be strided.
    """
    weights = in_whole_vectors(gates.float(), torch.sigmoid_)
    x.copy_(weights.mul_(x.flatten(1)).view(x.shape))


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up as [T, I], by the approximation with tanh, from float32.

    It is gate * sigmoid(2 y) with y = sqrt(2 / pi) (gate + 0.044715 gate^3).
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    z = (gate + gate * gate * gate * 0.044715) * (2 * (2 / math.pi) ** 0.5)
    weighed = in_whole_vectors(z, torch.sigmoid_).mul_(gate)
    return weighed.mul_(up).to(gate_up.dtype)


def swigluoai_and_mul(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return gate * sigmoid(alpha gate) * (up + 1) as [T, I], from float32.

    The gate, the first half of `gate_up` [T, 2I], is cut to at most `limit` before, and up to
    between -limit and limit.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    weighed = in_whole_vectors(gate * alpha, torch.sigmoid_).mul_(gate)
    return weighed.mul_(up.clamp(-limit, limit).add_(1)).to(gate_up.dtype)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up as [T, I] for `gate_up` [T, 2I] whose first half is the gate."""
    gate, up = gate_up.chunk(2, dim=-1)
    return in_whole_vectors(gate, lambda rows: F.silu(rows, inplace=True)).mul_(up).contiguous()


def in_whole_vectors(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a copy of x [T, I] that an elementwise function of torch has changed in place."""
    width = x.shape[-1]
    tail = -width % _VECTOR
    changed = F.pad(x, (0, tail)) if tail else x.clone(memory_format=torch.contiguous_format)
    for rows in torch.split(changed, max(1, _SERIAL_ELEMENTS // (width + tail))):
        change(rows)
    return changed[..., :width]


def apply_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate the two halves of every head by its row's position ("neox" layout).

    Args:
        q: [T, HQ, D].
        k: [T, HK, D], q's dtype.
        cos: [max_position, R/2] float32; rounded to q's dtype before use, as is `sin`. What does
            not rotate of a head comes behind what does.
        sin: [max_position, R/2] float32.
        positions: [T] int64.

    Returns:
        The rotated (q, k), views of one tensor.
    """
    num_rows, num_heads, head_dim = q.shape
    num_all, rotary_dim = num_heads + k.shape[1], 2 * cos.shape[1]
    both = torch.cat((q, k), dim=1)
    heads = both[..., :rotary_dim].reshape(num_rows, num_all, 2, rotary_dim // 2)
    cos_rows = cos.index_select(0, positions).to(q.dtype)[:, None, None]
    sin_rows = sin.index_select(0, positions).to(q.dtype)
    signed_sin = torch.stack((-sin_rows, sin_rows), dim=1).unsqueeze(1)  # [T, 1, 2, R/2]
    rotated = (
        (heads * cos_rows).add_(heads.flip(2).mul_(signed_sin)).view(num_rows, num_all, rotary_dim)
    )
    if rotary_dim < head_dim:
        rotated = torch.cat((rotated, both[..., rotary_dim:]), dim=-1)
    return rotated[:, :num_heads], rotated[:, num_heads:]
