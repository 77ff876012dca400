"""The small ops between the matrix products: norms, the gated activation and rotary embedding.

Shapes: T rows, H hidden, I intermediate, HQ / HK query and KV heads of this rank, D head_dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# torch's scalar exp rounds otherwise than its vector exp, and runs on what is left over when whole
# vectors (32 elements, unrolled AVX-512) are done: at the end of a tensor, and of each thread's
# part where it deals a tensor of 32768 elements or more to threads.
_VECTOR = 32
_SERIAL_ELEMENTS = 32767


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last axis, in weight's dtype.

    Computes in float32 and rounds once; Hugging Face rounds before the weight as well.

    Args:
        x: [..., H] float32 or bfloat16.
        weight: [H].
        eps: added to the mean square.
    """
    x32 = x.float()
    scale = x32.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x32 * scale).mul_(weight).to(weight.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual).

    The sum stays in float32 from layer to layer: rounding it to bfloat16 in each of them makes
    twice the error in the logits (SmolLM2-135M: 0.17 against 0.08 root mean square).

    Args:
        x: [T, H], the output of a block.
        residual: [T, H] float32.
        weight: [H].
        eps: added to the mean square.

    Returns:
        The normed rows in weight's dtype, and the new residual in float32.
    """
    total = residual + x
    return rms_norm(total, weight, eps), total


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up as [T, I] for `gate_up` [T, 2I] whose first half is the gate."""
    intermediate = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :intermediate], gate_up[..., intermediate:]
    tail = -intermediate % _VECTOR
    activated = (
        F.pad(gate, (0, tail)) if tail else gate.clone(memory_format=torch.contiguous_format)
    )
    for rows in torch.split(activated, max(1, _SERIAL_ELEMENTS // (intermediate + tail))):
        F.silu(rows, inplace=True)
    return activated[..., :intermediate].mul_(up).contiguous()


def apply_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate the two halves of every head by its row's position ("neox" layout).

    Args:
        q: [T, HQ, D].
        k: [T, HK, D], q's dtype.
        cos: [max_position, D/2] float32; rounded to q's dtype before use, as is `sin`.
        sin: [max_position, D/2] float32.
        positions: [T] int64.

    Returns:
        The rotated (q, k), views of one tensor.
    """
    num_rows, num_heads, head_dim = q.shape
    num_all = num_heads + k.shape[1]
    heads = torch.cat((q, k), dim=1).view(num_rows, num_all, 2, head_dim // 2)
    cos_rows = cos.index_select(0, positions).to(q.dtype)[:, None, None]
    sin_rows = sin.index_select(0, positions).to(q.dtype)
    signed_sin = torch.stack((-sin_rows, sin_rows), dim=1).unsqueeze(1)  # [T, 1, 2, D/2]
    rotated = (
        (heads * cos_rows).add_(heads.flip(2).mul_(signed_sin)).view(num_rows, num_all, head_dim)
    )
    return rotated[:, :num_heads], rotated[:, num_heads:]
