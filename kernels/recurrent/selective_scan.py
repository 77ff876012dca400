"""Mamba-2's recurrence (Dao and Gu, arXiv:2405.21060), row by row in torch.

Each row is computed by itself, so that torch takes the same elements into the same vectors whatever
else there is.

Shapes: T rows, H heads of D features, G groups of N state features, P state pages.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.recurrent.state_runs import StateRun, check_states, state_at
from kernels.recurrent.weights import ScanWeight


def selective_scan(
    xbc: Tensor, dt: Tensor, weight: ScanWeight, states: Tensor, rows: Sequence[StateRun]
) -> Tensor:
    """Return the outputs [T, H D] float32; see `RecurrentKernels`."""
    check_states(states)
    _, num_heads, state_size, head_dim = states.shape
    inner, groups = num_heads * head_dim, num_groups(xbc, states)
    y = torch.zeros(xbc.shape[0], num_heads, head_dim)
    d = weight.d.unsqueeze(1)
    for run in rows:
        state = state_at(states, run).view(groups, -1, state_size, head_dim)
        for row in range(run.start, run.stop):
            of_row = xbc[row].float()
            x = of_row[:inner].view(num_heads, head_dim)
            b, c = of_row[inner:].view(2, groups, 1, state_size, 1).unbind()
            step = F.softplus(dt[row].float() + weight.dt_bias).clamp_(*weight.dt_limit)
            decay = torch.exp(step * weight.a).view(groups, -1, 1, 1)
            scaled = (step.unsqueeze(1) * x).view(groups, -1, 1, head_dim)
            state.mul_(decay).add_(b * scaled)
            y[row] = (state * c).sum(2).view(num_heads, head_dim) + d * x
        states[run.page] = state.view(states.shape[1:])
    return y.flatten(1)


def num_groups(xbc: Tensor, states: Tensor) -> int:
    """Return G of xbc [T, H D + 2 G N] beside states [P, H, N, D]."""
    _, num_heads, state_size, head_dim = states.shape
    groups, rest = divmod(xbc.shape[1] - num_heads * head_dim, 2 * state_size)
    assert groups > 0 and rest == 0, f"x, b and c in {xbc.shape[1]} features"
    assert num_heads % groups == 0, f"{num_heads} heads of {groups} groups"
    return groups
