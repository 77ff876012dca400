"""What every kernel means: dense, obvious torch without pages, packing or batching tricks.

The fast forms are tested against these, in any dtype (tests use float64); nothing in the product
calls them.

Shapes: T rows, K inputs, N outputs, H hidden, R lora_rank, HQ / HK heads, D head_dim, P pages.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [T, K] @ weight [N, K] transposed, plus bias [N]."""
    y = x @ weight.T
    return y if bias is None else y + bias


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return gate * sigmoid(gate) * up for gate_up [T, 2I], gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate (first half, second half) of each head of x [T, heads, D] as a plane vector."""
    cos_rows, sin_rows = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        (first * cos_rows - second * sin_rows, second * cos_rows + first * sin_rows), dim=-1
    )


def lora(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return b (a x) for x [T, K], a [R, K], b [N, R]."""
    return (x @ a.T) @ b.T


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return causal attention of the last positions of one sequence.

    Args:
        q: [T, HQ, D], the rows of the last T positions.
        k: [L, HK, D], every position; query head h reads KV head h * HK // HQ.
        v: [L, HK, D].
        scale: multiplies the scores.
    """
    num_rows, length, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(group, dim=1)
    values = v.repeat_interleave(group, dim=1)
    scores = scale * torch.einsum("thd,lhd->htl", q, keys)
    last_seen = torch.arange(length - num_rows, length).unsqueeze(1)
    scores = scores.masked_fill(torch.arange(length) > last_seen, -torch.inf)
    return torch.einsum("htl,lhd->thd", torch.softmax(scores, dim=-1), values)


def read_pages(pool: Tensor, table: Sequence[int], length: int) -> Tensor:
    """Return positions [0, length) of a page list of [P, HK, page, D] as [length, HK, D]."""
    used = table[: -(-length // pool.shape[2])]
    return torch.cat([pool[page].transpose(0, 1) for page in used])[:length]
