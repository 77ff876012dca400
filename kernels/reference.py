"""What every kernel means: dense, obvious torch without pages, packing or batching tricks.

The fast forms are tested against these, in any dtype (tests use float64); nothing in the product
calls them.

Shapes: T rows, K inputs, N outputs, H hidden, R lora_rank, HQ / HK heads, D head_dim, P pages,
E experts, I intermediate.
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


def gate_heads(x: Tensor, gates: Tensor) -> Tensor:
    """Return x [T, HQ, D] * sigmoid(gates [T, HQ D])."""
    return x * torch.sigmoid(gates).view(x.shape)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return gate * sigmoid(gate) * up for gate_up [T, 2I], gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up for gate_up [T, 2I], gate first, by the approximation with tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    y = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(y)) * up


def swigluoai_and_mul(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return gate * sigmoid(alpha gate) * (up + 1) for gate_up [T, 2I], gate first.

    The gate is cut to at most `limit` before, and up to between -limit and limit.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate (first half, second half) of each head of x [T, heads, D] as a plane vector.

    With tables [M, R/2] of fewer than D/2 angles the first R features rotate alone.
    """
    x, rest = x[..., : 2 * cos.shape[1]], x[..., 2 * cos.shape[1] :]
    cos_rows, sin_rows = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        (first * cos_rows - second * sin_rows, second * cos_rows + first * sin_rows, rest), dim=-1
    )


def lora(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return b (a x) for x [T, K], a [R, K], b [N, R]."""
    return (x @ a.T) @ b.T


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Return the numbers and weights [T, top_k] of each row's experts, the best first.

    The best are those of the largest logits [T, E], of equals the lower numbers; their weights are
    their softmax over all logits, divided by their sum if they are renormalised.
    """
    chosen = torch.tensor(
        [sorted(range(len(row)), key=lambda i: (-row[i], i))[:top_k] for row in logits.tolist()]
    )
    weights = torch.softmax(logits, dim=-1).gather(1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) if renormalize else weights


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    start: Tensor | None = None,
    gates: Tensor | None = None,
) -> Tensor:
    """Return the sum of each row's experts, times their weights, for x [T, H].

    Args:
        x: [T, H].
        chosen: [T, k], the experts of each row.
        weights: [T, k], likewise.
        gate_up: [E, 2I, H], the gate first.
        down: [E, H, I].
        start: [T, H], what is added to it; None: nothing.
        gates: [T, 1], whose sigmoid that is multiplied by; None: 1.
    """
    y = torch.zeros_like(x) if start is None else start.clone()
    if gates is not None:
        y *= torch.sigmoid(gates)
    for row, (own, shares) in enumerate(zip(chosen.tolist(), weights, strict=True)):
        for expert, share in zip(own, shares, strict=True):
            inner = silu_and_mul(linear(x[row : row + 1], gate_up[expert]))
            y[row] += share * linear(inner, down[expert])[0]
    return y


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return causal attention of the last positions of one sequence.

    Args:
        q: [T, HQ, D], the rows of the last T positions.
        k: [L, HK, D], every position; query head h reads KV head h * HK // HQ.
        v: [L, HK, D].
        scale: multiplies the scores.
        window: positions that a row sees, its own the last; None: all.
        sinks: [HQ], for each head the score of one more position, whose V is 0; None: there is
            none.
    """
    num_rows, length, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(group, dim=1)
    values = v.repeat_interleave(group, dim=1)
    scores = scale * torch.einsum("thd,lhd->htl", q, keys)
    last_seen = torch.arange(length - num_rows, length).unsqueeze(1)
    scores = scores.masked_fill(torch.arange(length) > last_seen, -torch.inf)
    if window is not None:
        scores = scores.masked_fill(torch.arange(length) <= last_seen - window, -torch.inf)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, num_rows, 1)
        scores = torch.cat((scores, sink), dim=-1)
    return torch.einsum("htl,lhd->thd", torch.softmax(scores, dim=-1)[..., :length], values)


def read_pages(pool: Tensor, table: Sequence[int], length: int) -> Tensor:
    """Return positions [0, length) of a page list of [P, HK, page, D] as [length, HK, D]."""
    used = table[: -(-length // pool.shape[2])]
    return torch.cat([pool[page].transpose(0, 1) for page in used])[:length]
