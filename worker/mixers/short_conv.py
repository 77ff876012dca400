"""LFM2's gated short convolution (transformers.models.lfm2, Lfm2ShortConv).

Shapes: T rows, H hidden, C channels of this rank, K taps.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.interface import AnyKernels
from kernels.linear import LinearWeight
from kernels.recurrent.weights import ConvWeight
from worker.distributed.row_parallel import row_parallel_linear
from worker.mixers.mixer import MixerContext


@dataclass(frozen=True, slots=True)
class ShortConvWeights:
    """Of one layer; ranks share out the channels."""

    in_proj: LinearWeight  # [3 C, H]: b, c and x
    conv: ConvWeight  # [K, C]
    out_proj: LinearWeight  # [H, C]

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return self.in_proj.num_bytes + self.conv.num_bytes + self.out_proj.num_bytes


class ShortConv:
    """See `worker.mixers.mixer.Mixer`."""

    def __init__(self, weights: ShortConvWeights, kernels: AnyKernels) -> None:
        self._weights = weights
        self._kernels = kernels

    def forward(self, x_TH: Tensor, context: MixerContext) -> Tensor:
        weights, kernels = self._weights, self._kernels
        (states,) = context.states
        bcx_TC3 = kernels.linear(x_TH, weights.in_proj, context.in_lora)
        y_TC = kernels.short_conv(
            bcx_TC3, weights.conv, states, context.rows, weights.out_proj.dtype
        )
        return row_parallel_linear(kernels, y_TC, weights.out_proj, context.out_lora, context.group)
