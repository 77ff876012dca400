"""The recurrence of gated delta nets (Yang et al., arXiv:2412.06464), row by row in torch.

Each row is computed by itself, so that torch takes the same elements into the same vectors whatever
else there is.

Shapes: T rows, HK key heads of DK features, HV value heads of DV, P state pages.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.recurrent.state_runs import StateRun, check_states, state_at
from kernels.recurrent.weights import DeltaWeight

LENGTH_EPS = 1e-6  # added to the squares of q and of k, as transformers has it


def gated_delta_rule(
    qkv: Tensor, a: Tensor, b: Tensor, weight: DeltaWeight, states: Tensor, rows: Sequence[StateRun]
) -> Tensor:
    """Return the outputs [T, HV DV] float32; see `RecurrentKernels`."""
    check_states(states)
    _, num_heads, key_dim, value_dim = states.shape
    keys = num_key_heads(qkv, states) * key_dim
    y = torch.zeros(qkv.shape[0], num_heads, value_dim)
    for run in rows:
        # By key head and its value heads.
        state = state_at(states, run).view(keys // key_dim, -1, key_dim, value_dim)
        for row in range(run.start, run.stop):
            of_row = qkv[row].float()
            q, k = _unit(of_row[: 2 * keys].view(2, -1, 1, key_dim, 1)).unbind()
            v = of_row[2 * keys :].view(keys // key_dim, -1, value_dim)
            decay = torch.exp(F.softplus(a[row].float() + weight.dt_bias) * weight.a)
            beta = torch.sigmoid(b[row].float()).view(keys // key_dim, -1, 1)
            state.mul_(decay.view(keys // key_dim, -1, 1, 1))
            error = (v - (state * k).sum(2)) * beta
            state.add_(k * error.unsqueeze(2))
            y[row] = (state * (q * key_dim**-0.5)).sum(2).view(num_heads, value_dim)
        states[run.page] = state.view(states.shape[1:])
    return y.flatten(1)


def num_key_heads(qkv: Tensor, states: Tensor) -> int:
    """Return HK of qkv [T, 2 HK DK + HV DV] beside states [P, HV, DK, DV]."""
    _, num_heads, key_dim, value_dim = states.shape
    keys, rest = divmod(qkv.shape[1] - num_heads * value_dim, 2 * key_dim)
    assert keys > 0 and rest == 0, f"q, k and v in {qkv.shape[1]} features"
    assert num_heads % keys == 0, f"{num_heads} value heads of {keys} key heads"
    return keys


def _unit(x: Tensor) -> Tensor:
    """Return x [2, HK, 1, DK, 1] divided by the length of each head."""
    return x * x.square().sum(3, keepdim=True).add_(LENGTH_EPS).rsqrt_()
