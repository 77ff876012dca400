"""The functions of recurrent layers on a GPU, by the kernels beside this file."""

import torch
from torch import Tensor

from kernels.gpu.batch_metadata import StateMetadata
from kernels.gpu.recurrent.causal_conv import causal_conv, short_conv
from kernels.gpu.recurrent.gated_delta_rule import gated_delta_rule
from kernels.gpu.recurrent.gated_norm import gated_norm, gated_squares
from kernels.gpu.recurrent.selective_scan import selective_scan
from kernels.recurrent.weights import ConvWeight, DeltaWeight, ScanWeight, SharedSquares


class GpuRecurrent:
    """See `kernels.recurrent.interface.RecurrentKernels`."""

    def causal_conv(
        self, x: Tensor, weight: ConvWeight, states: Tensor, rows: StateMetadata, *, has_silu: bool
    ) -> Tensor:
        return causal_conv(x, weight, states, rows, has_silu=has_silu)

    def short_conv(
        self,
        bcx: Tensor,
        weight: ConvWeight,
        states: Tensor,
        rows: StateMetadata,
        dtype: torch.dtype,
    ) -> Tensor:
        return short_conv(bcx, weight, states, rows, dtype)

    def selective_scan(
        self, xbc: Tensor, dt: Tensor, weight: ScanWeight, states: Tensor, rows: StateMetadata
    ) -> Tensor:
        return selective_scan(xbc, dt, weight, states, rows)

    def gated_delta_rule(
        self,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        weight: DeltaWeight,
        states: Tensor,
        rows: StateMetadata,
    ) -> Tensor:
        return gated_delta_rule(qkv, a, b, weight, states, rows)

    def gated_squares(self, x: Tensor, gate: Tensor, *, gate_first: bool) -> Tensor:
        return gated_squares(x, gate, gate_first=gate_first)

    def gated_norm(
        self,
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
        return gated_norm(
            x, gate, weight, group_size, eps, dtype, gate_first=gate_first, shared=shared
        )
