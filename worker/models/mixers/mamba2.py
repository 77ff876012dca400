"""The Mamba-2 mixer of Granite 4 and Falcon-H1 (transformers' GraniteMoeHybridMambaLayer).

Shapes: T rows, M hidden, H heads of D features on this rank, I = H D, G groups of N state features,
C = I + 2 G N channels of the convolution, K taps.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.interface import AnyKernels
from kernels.linear import LinearWeight
from kernels.recurrent.weights import ConvWeight, ScanWeight
from worker.models.mixers.mixer import MixerContext, project_in, project_out


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """What the layers have in common on one rank."""

    num_heads: int
    head_dim: int
    num_groups: int  # of the b and c of this rank's heads
    state_size: int
    norm_group_size: int  # features that are normed together, all on one rank
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


class Mamba2:
    """See `worker.models.mixers.mixer.Mixer`."""

    def __init__(self, shape: Mamba2Shape, weights: Mamba2Weights, kernels: AnyKernels) -> None:
        self._shape = shape
        self._weights = weights
        self._kernels = kernels

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        shape, (num_taps, num_channels) = self._shape, self._weights.conv.taps.shape
        return (num_taps - 1, num_channels), (shape.num_heads, shape.state_size, shape.head_dim)

    def forward(self, x_TM: Tensor, context: MixerContext) -> Tensor:
        shape, weights, kernels = self._shape, self._weights, self._kernels
        conv_states, scan_states = context.states
        projected = project_in(kernels, x_TM, weights.in_proj, context.in_lora)
        widths = shape.inner, weights.conv.taps.shape[1], shape.num_heads
        gate_TI, xbc_TC, dt_TH = projected.split(widths, dim=1)
        xbc_TC = kernels.causal_conv(
            xbc_TC, weights.conv, conv_states, context.rows, has_silu=True
        )
        y_TI = kernels.selective_scan(xbc_TC, dt_TH, weights.scan, scan_states, context.rows)
        y_TI = kernels.gated_norm(
            y_TI,
            gate_TI,
            weights.norm,
            shape.norm_group_size,
            shape.norm_eps,
            weights.out_proj.dtype,
            gate_first=shape.gate_first,
        )
        return project_out(kernels, y_TI, weights.out_proj, context.out_lora, context.group)
