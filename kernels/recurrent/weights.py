"""What recurrent layers need besides the outputs of their linears, ready for use.

All is float32: it is little, and is read beside float32 states.

Shapes: T rows, C channels, K taps, H heads, HV value heads.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ConvWeight:
    """A depthwise causal convolution."""

    taps: Tensor  # [K, C], the newest input's last
    bias: Tensor | None  # [C]

    @property
    def num_bytes(self) -> int:
        """Bytes of both."""
        return self.taps.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class ScanWeight:
    """Mamba-2's recurrence."""

    a: Tensor  # [H], below 0: -exp(A_log)
    dt_bias: Tensor  # [H]
    d: Tensor  # [H]
    dt_limit: tuple[float, float]  # time steps are clamped to it

    @property
    def num_bytes(self) -> int:
        """Bytes of all."""
        return self.a.nbytes + self.dt_bias.nbytes + self.d.nbytes


@dataclass(frozen=True, slots=True)
class DeltaWeight:
    """The recurrence of a gated delta net."""

    a: Tensor  # [HV], below 0: -exp(A_log)
    dt_bias: Tensor  # [HV]

    @property
    def num_bytes(self) -> int:
        """Bytes of both."""
        return self.a.nbytes + self.dt_bias.nbytes


@dataclass(frozen=True, slots=True)
class SharedSquares:
    """What a norm over features of several ranks has to know of all of them."""

    sums: Tensor  # [T, 1] float32, `gated_squares` summed over the ranks
    width: int  # features of all ranks


def prepare_conv(weight: Tensor, bias: Tensor | None) -> ConvWeight:
    """Return the weight of a convolution as checkpoints have it, [C, 1, K] and [C]."""
    taps = weight.squeeze(1).T.float().contiguous()
    return ConvWeight(taps, None if bias is None else bias.float().contiguous())


def prepare_scan(
    a_log: Tensor, dt_bias: Tensor, d: Tensor, dt_limit: tuple[float, float]
) -> ScanWeight:
    """Return what a checkpoint calls A_log, dt_bias and D [H], of any dtype."""
    a = -a_log.float().exp()
    return ScanWeight(a, dt_bias.float().contiguous(), d.float().contiguous(), dt_limit)


def prepare_delta(a_log: Tensor, dt_bias: Tensor) -> DeltaWeight:
    """Return what a checkpoint calls A_log and dt_bias [HV], of any dtype."""
    return DeltaWeight(-a_log.float().exp(), dt_bias.float().contiguous())
