"""The norm and the gate between a recurrence and its output projection, in torch.

Families differ in which of the two comes first, and whether there is a norm at all. All is computed
in float32 and rounded once.

Shapes: T rows, W features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.elementwise import in_whole_vectors


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    group_size: int,
    eps: float,
    dtype: torch.dtype,
    *,
    gate_first: bool,
) -> Tensor:
    """Return the gated norm of x [T, W] float32; see `RecurrentKernels`."""
    gate = in_whole_vectors(gate.float(), lambda part: F.silu(part, inplace=True))
    if weight is None:
        return (x * gate).to(dtype)
    if gate_first:
        x = x * gate
    groups = x.unflatten(1, (-1, group_size))
    scale = groups.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    y = (groups * scale).flatten(1).mul_(weight)
    return (y if gate_first else y.mul_(gate)).to(dtype)
