"""The gated delta net of Qwen3-Next and Qwen3.5 (transformers' Qwen3_5GatedDeltaNet).

Shapes: T rows, M hidden; of this rank HK key heads of DK features and HV value heads of DV; C =
2 HK DK + HV DV channels of the convolution, K taps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import AnyKernels
from kernels.linear import LinearWeight
from kernels.recurrent.weights import ConvWeight, DeltaWeight
from worker.distributed.row_parallel import row_parallel_linear
from worker.mixers.mixer import MixerContext


@dataclass(frozen=True, slots=True)
class GatedDeltaNetShape:
    """What the layers have in common on one rank."""

    num_value_heads: int
    value_dim: int
    norm_eps: float


@dataclass(frozen=True, slots=True)
class GatedDeltaNetWeights:
    """Of one layer; ranks share out key heads, with their value heads."""

    in_proj: LinearWeight  # [C + HV DV + 2 HV, M]: q, k and v, z, b, a; Qwen3-Next's put in order
    conv: ConvWeight  # [K, C]
    delta: DeltaWeight  # [HV]
    norm: Tensor  # [HV DV]: the checkpoint's [DV] for each head
    out_proj: LinearWeight  # [M, HV DV]

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        recurrence = self.conv.num_bytes + self.delta.num_bytes + self.norm.nbytes
        return self.in_proj.num_bytes + recurrence + self.out_proj.num_bytes


class GatedDeltaNet:
    """See `worker.mixers.mixer.Mixer`."""

    def __init__(
        self, shape: GatedDeltaNetShape, weights: GatedDeltaNetWeights, kernels: AnyKernels
    ) -> None:
        self._shape = shape
        self._weights = weights
        self._kernels = kernels

    def forward(self, x_TM: Tensor, context: MixerContext) -> Tensor:
        shape, weights, kernels = self._shape, self._weights, self._kernels
        conv_states, delta_states = context.states
        projected = kernels.linear(x_TM, weights.in_proj, context.in_lora)
        heads = shape.num_value_heads
        widths = [weights.conv.taps.shape[1], heads * shape.value_dim, heads, heads]
        qkv, z, b, a = torch.split(projected, widths, dim=1)
        qkv = kernels.causal_conv(qkv, weights.conv, conv_states, context.rows, has_silu=True)
        y = kernels.gated_delta_rule(qkv, a, b, weights.delta, delta_states, context.rows)
        y = kernels.gated_norm(
            y,
            z,
            weights.norm,
            shape.value_dim,
            shape.norm_eps,
            weights.out_proj.dtype,
            gate_first=False,
        )
        return row_parallel_linear(kernels, y, weights.out_proj, context.out_lora, context.group)
