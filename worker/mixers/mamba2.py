"""The Mamba-2 mixer of Granite 4 and Falcon-H1 (transformers' GraniteMoeHybridMambaLayer).

Shapes: T rows, M hidden, H heads of D features on this rank, I = H D, G groups of N state features,
C = I + 2 G N channels of the convolution, K taps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import AnyKernels
from kernels.linear import LinearWeight
from kernels.recurrent.weights import ConvWeight, ScanWeight, SharedSquares
from worker.distributed.communicator import Communicator
from worker.distributed.row_parallel import all_inputs, row_parallel_linear
from worker.mixers.mixer import MixerContext


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """What the layers have in common on one rank."""

    num_heads: int
    head_dim: int
    norm_group_size: int  # features that are normed together, of this rank
    all_inner: int | None  # I of all ranks, if they are one group of the norm; None: they are not
    norm_eps: float
    gate_first: bool  # whether the gate comes before the norm

    @property
    def inner(self) -> int:
        """I."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """Of one layer; ranks share out heads."""

    in_proj: LinearWeight  # [I + C + H, M]: gate, what is convolved, dt
    conv: ConvWeight  # [K, C]
    scan: ScanWeight  # [H]
    norm: Tensor | None  # [I]; None: there is only a gate
    out_proj: LinearWeight  # [M, I]

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        norm = 0 if self.norm is None else self.norm.nbytes
        recurrence = self.conv.num_bytes + self.scan.num_bytes + norm
        return self.in_proj.num_bytes + recurrence + self.out_proj.num_bytes


class Mamba2:
    """See `worker.mixers.mixer.Mixer`."""

    def __init__(self, shape: Mamba2Shape, weights: Mamba2Weights, kernels: AnyKernels) -> None:
        self._shape = shape
        self._weights = weights
        self._kernels = kernels

    def forward(self, x_TM: Tensor, context: MixerContext) -> Tensor:
        shape, weights, kernels = self._shape, self._weights, self._kernels
        conv_states, scan_states = context.states
        projected = kernels.linear(x_TM, weights.in_proj, context.in_lora)
        widths = [shape.inner, weights.conv.taps.shape[1], shape.num_heads]
        gate_TI, xbc_TC, dt_TH = torch.split(projected, widths, dim=1)
        xbc_TC = kernels.causal_conv(xbc_TC, weights.conv, conv_states, context.rows, has_silu=True)
        y_TI = kernels.selective_scan(xbc_TC, dt_TH, weights.scan, scan_states, context.rows)
        y_TI = self._normed(y_TI, gate_TI, context.group)
        return row_parallel_linear(kernels, y_TI, weights.out_proj, context.out_lora, context.group)

    def _normed(self, y_TI: Tensor, gate_TI: Tensor, group: Communicator) -> Tensor:
        shape, weights, kernels = self._shape, self._weights, self._kernels
        shared = None
        if shape.all_inner is not None and weights.norm is not None:
            shared = SharedSquares(self._squares(y_TI, gate_TI, group), shape.all_inner)
        return kernels.gated_norm(
            y_TI,
            gate_TI,
            weights.norm,
            shape.norm_group_size,
            shape.norm_eps,
            weights.out_proj.dtype,
            gate_first=shape.gate_first,
            shared=shared,
        )

    def _squares(self, y_TI: Tensor, gate_TI: Tensor, group: Communicator) -> Tensor:
        """Return the sum [T, 1] of squares of what is normed, over all ranks."""
        kernels, out_proj = self._kernels, self._weights.out_proj
        gate_first = self._shape.gate_first
        if out_proj.shared is None:
            return group.all_reduce(kernels.gated_squares(y_TI, gate_TI, gate_first=gate_first))
        y_TI = all_inputs(kernels, y_TI, out_proj, group, "all of a norm")
        gate_TI = all_inputs(kernels, gate_TI, out_proj, group, "all gates")
        return kernels.gated_squares(y_TI, gate_TI, gate_first=gate_first)
