"""The norm and the gate between a recurrence and its output projection, in torch.

Families differ in which of the two comes first, and whether there is a norm at all. All is computed
in float32 and rounded once.

Shapes: T rows, W features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.elementwise import in_whole_vectors
from kernels.recurrent.weights import SharedSquares


def gated_squares(x: Tensor, gate: Tensor, *, gate_first: bool) -> Tensor:
    """Return the squares of what is normed, added up: [T, 1] float32; see `RecurrentKernels`."""
    return (x * _silu(gate) if gate_first else x).square().sum(-1, keepdim=True)


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    group_size: int,
    eps: float,
    dtype: torch.dtype,
    *,
    gate_first: bool,
    shared: SharedSquares | None = None,
) -> Tensor:
    """Return the gated norm of x [T, W] float32; see `RecurrentKernels`."""
    gate = _silu(gate)
    if weight is None:
        return (x * gate).to(dtype)
    if gate_first:
        x = x * gate
    groups = x.reshape(x.shape[0], x.shape[1] // group_size, group_size)
    if shared is None:
        mean = groups.square().mean(-1, keepdim=True)
    else:
        assert group_size == x.shape[1], "all ranks are one group"
        mean = (shared.sums / shared.width).unsqueeze(1)
    y = (groups * mean.add_(eps).rsqrt_()).flatten(1).mul_(weight)
    return (y if gate_first else y.mul_(gate)).to(dtype)


def _silu(gate: Tensor) -> Tensor:
    return in_whole_vectors(gate.float(), lambda part: F.silu(part, inplace=True))
