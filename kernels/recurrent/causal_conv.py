"""Depthwise causal convolutions of a few taps, in torch.

A sum goes from the bias over the oldest input to the newest, in float32.

Shapes: T rows, C channels, K taps, P state pages.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.elementwise import in_whole_vectors
from kernels.recurrent.state_runs import StateRun, check_states, state_at
from kernels.recurrent.weights import ConvWeight


def causal_conv(
    x: Tensor, weight: ConvWeight, states: Tensor, rows: Sequence[StateRun], *, has_silu: bool
) -> Tensor:
    """Return the convolution of x [T, C], through SiLU or not; see `RecurrentKernels`."""
    y = _convolve(x.float(), weight, states, rows)
    if has_silu:
        y = in_whole_vectors(y, lambda part: F.silu(part, inplace=True))
    return y.to(x.dtype)


def short_conv(
    bcx: Tensor, weight: ConvWeight, states: Tensor, rows: Sequence[StateRun], dtype: torch.dtype
) -> Tensor:
    """Return LFM2's gated convolution of bcx [T, 3C]; see `RecurrentKernels`."""
    b, c, x = bcx.float().chunk(3, dim=1)
    return _convolve(b * x, weight, states, rows).mul_(c).to(dtype)


def _convolve(x: Tensor, weight: ConvWeight, states: Tensor, rows: Sequence[StateRun]) -> Tensor:
    check_states(states)
    y = torch.zeros_like(x)
    if weight.bias is not None:
        y += weight.bias
    for run in rows:
        inputs = torch.cat((state_at(states, run), x[run.start : run.stop]))
        of_run = y[run.start : run.stop]
        for tap, oldest in zip(weight.taps, range(len(weight.taps)), strict=True):
            of_run += tap * inputs[oldest : oldest + len(of_run)]
        states[run.page] = inputs[len(of_run) :]
    return y
