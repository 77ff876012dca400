"""What each kernel of this folder means: for one sequence, dense, obvious torch.

The fast forms are tested against these, in any dtype (tests use float64), and these against
transformers; nothing in the product calls them. A state of None is zero.

Shapes: L positions of a sequence, C channels, K taps, H heads of D features, G groups of N state
features; HK key heads of DK features, HV value heads of DV.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv(
    x: Tensor, taps: Tensor, bias: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the convolution of x [L, C] by taps [K, C], and the last K - 1 inputs.

    Args:
        x: [L, C].
        taps: [K, C], the newest input's last.
        bias: [C] or None.
        state: [K - 1, C], the inputs before x.
    """
    num_before = len(taps) - 1
    before = torch.zeros_like(x[:1]).expand(num_before, -1) if state is None else state
    inputs = torch.cat((before, x))
    y = sum(tap * inputs[i : i + len(x)] for i, tap in enumerate(taps))
    return (y if bias is None else y + bias), inputs[len(x) :]


def selective_scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    d: Tensor,
    dt_limit: tuple[float, float],
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return Mamba-2's outputs [L, H, D] and the state [H, N, D] behind them.

    Args:
        x: [L, H, D].
        b: [L, G, N].
        c: [L, G, N].
        dt: [L, H], before bias, softplus and clamp.
        a: [H], below 0.
        dt_bias: [H].
        d: [H].
        dt_limit: what time steps are clamped to.
        state: [H, N, D] before x.
    """
    group = x.shape[1] // b.shape[1]
    b, c = b.repeat_interleave(group, dim=1), c.repeat_interleave(group, dim=1)
    dt = F.softplus(dt + dt_bias).clamp(*dt_limit)
    if state is None:
        state = x.new_zeros(x.shape[1], b.shape[2], x.shape[2])
    outputs = []
    for i in range(len(x)):
        decay = torch.exp(dt[i] * a)
        added = torch.einsum("hn,hd->hnd", b[i], dt[i].unsqueeze(1) * x[i])
        state = decay[:, None, None] * state + added
        outputs.append(torch.einsum("hnd,hn->hd", state, c[i]) + d.unsqueeze(1) * x[i])
    return torch.stack(outputs), state


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return a gated delta net's outputs [L, HV, DV] and the state [HV, DK, DV] behind them.

    Args:
        q: [L, HK, DK], of any length.
        k: [L, HK, DK], likewise.
        v: [L, HV, DV].
        decay: [L, HV], the state's, between 0 and 1.
        beta: [L, HV], how much of the error is mended.
        state: [HV, DK, DV] before q.
    """
    group, key_dim = v.shape[1] // k.shape[1], k.shape[2]
    q, k = (_unit(x).repeat_interleave(group, dim=1) for x in (q, k))
    q = q * key_dim**-0.5
    if state is None:
        state = v.new_zeros(v.shape[1], key_dim, v.shape[2])
    outputs = []
    for i in range(len(v)):
        state = decay[i][:, None, None] * state
        error = v[i] - torch.einsum("hkv,hk->hv", state, k[i])
        state = state + torch.einsum("hk,hv->hkv", k[i], beta[i].unsqueeze(1) * error)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[i]))
    return torch.stack(outputs), state


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, group_size: int, eps: float, *, gate_first: bool
) -> Tensor:
    """Return the RMS norm of x [L, W] in groups, gated; see the interface."""
    gate = gate * torch.sigmoid(gate)
    if weight is None:
        return x * gate
    if gate_first:
        x = x * gate
    groups = x.reshape(len(x), x.shape[1] // group_size, group_size)
    y = groups / torch.sqrt((groups * groups).mean(-1, keepdim=True) + eps)
    y = y.flatten(1) * weight
    return y if gate_first else y * gate
