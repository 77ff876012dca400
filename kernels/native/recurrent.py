"""The functions of layers whose past is a state, by the C functions of kernels.native.

Shapes: see `kernels.recurrent.interface`. What a linear wrote is float32.
"""

import torch
from torch import Tensor

from kernels.native.op_runner import OpRunner, at, is_bf16
from kernels.native.ops import CausalConvOp, GatedDeltaRuleOp, GatedNormOp, SelectiveScanOp
from kernels.native.program import Step
from kernels.recurrent.gated_delta_rule import num_key_heads
from kernels.recurrent.selective_scan import num_groups
from kernels.recurrent.state_runs import check_states
from kernels.recurrent.weights import ConvWeight, DeltaWeight, ScanWeight, SharedSquares


class NativeRecurrent(OpRunner):
    """See `kernels.recurrent.interface.RecurrentKernels`."""

    def causal_conv(  # type: ignore[override]
        self, x: Tensor, weight: ConvWeight, states: Tensor, rows: Step, *, has_silu: bool
    ) -> Tensor:
        return self._convolve(x, weight, states, rows, x.dtype, has_gates=False, has_silu=has_silu)

    def short_conv(  # type: ignore[override]
        self, bcx: Tensor, weight: ConvWeight, states: Tensor, rows: Step, dtype: torch.dtype
    ) -> Tensor:
        return self._convolve(bcx, weight, states, rows, dtype, has_gates=True, has_silu=False)

    def _convolve(
        self,
        x: Tensor,
        weight: ConvWeight,
        states: Tensor,
        rows: Step,
        dtype: torch.dtype,
        *,
        has_gates: bool,
        has_silu: bool,
    ) -> Tensor:
        _check_rows(x)
        check_states(states)
        num_taps, num_channels = weight.taps.shape
        assert x.shape[1] == num_channels * (3 if has_gates else 1), "inputs of all channels"
        assert states.shape[1:] == (num_taps - 1, num_channels), "the last inputs of all channels"
        out = self._out("convolved", x.shape[0], (num_channels,), dtype)
        tensors = x, weight.taps, weight.bias, states, out
        strides = x.stride(0), states.stride(0)
        flags = has_gates, has_silu, is_bf16(out)
        op = CausalConvOp(*map(at, tensors), *strides, num_channels, num_taps, *flags)
        self._do("causal_conv", op, rows, tensors)
        return out

    def selective_scan(  # type: ignore[override]
        self, xbc: Tensor, dt: Tensor, weight: ScanWeight, states: Tensor, rows: Step
    ) -> Tensor:
        _check_rows(xbc, dt)
        check_states(states)
        _, num_heads, state_size, head_dim = states.shape
        out = self._out("scanned", xbc.shape[0], (num_heads * head_dim,), torch.float32)
        tensors = xbc, dt, weight.a, weight.dt_bias, weight.d, states, out
        strides = xbc.stride(0), dt.stride(0), states.stride(0)
        shape = num_heads, num_groups(xbc, states), state_size, head_dim
        op = SelectiveScanOp(*map(at, tensors), *strides, *shape, *weight.dt_limit)
        self._do("selective_scan", op, rows, tensors)
        return out

    def gated_delta_rule(  # type: ignore[override]
        self, qkv: Tensor, a: Tensor, b: Tensor, weight: DeltaWeight, states: Tensor, rows: Step
    ) -> Tensor:
        _check_rows(qkv, a, b)
        check_states(states)
        _, num_heads, key_dim, value_dim = states.shape
        out = self._out("recalled", qkv.shape[0], (num_heads * value_dim,), torch.float32)
        tensors = qkv, a, b, weight.a, weight.dt_bias, states, out
        strides = qkv.stride(0), a.stride(0), b.stride(0), states.stride(0)
        shape = num_key_heads(qkv, states), num_heads, key_dim, value_dim
        op = GatedDeltaRuleOp(*map(at, tensors), *strides, *shape)
        self._do("gated_delta_rule", op, rows, tensors)
        return out

    def gated_squares(self, x: Tensor, gate: Tensor, *, gate_first: bool) -> Tensor:
        _check_rows(x, gate)
        assert x.is_contiguous(), "as a recurrence writes them"
        num_rows, width = x.shape
        sums = self._out("gated squares", num_rows, (1,), torch.float32)
        flags = gate_first, False, False
        sizes = gate.stride(0), width, width, width
        op = GatedNormOp(*map(at, (x, gate, sums, None, None)), *sizes, *flags, 0.0)
        self._do("gated_squares", op, num_rows, (x, gate, sums))
        return sums

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
        _check_rows(x, gate)
        num_rows, width = x.shape
        assert x.is_contiguous() and width % group_size == 0, "rows of whole groups"
        assert shared is None or group_size == width, "all ranks are one group"
        out = self._out("gated", num_rows, (width,), dtype)
        sums, all_width = (None, width) if shared is None else (shared.sums, shared.width)
        tensors = x, gate, sums, weight, out
        is_weight_bf16 = weight is not None and is_bf16(weight)
        flags = gate_first or weight is None, is_weight_bf16, is_bf16(out)
        sizes = gate.stride(0), width, group_size, all_width
        op = GatedNormOp(*map(at, tensors), *sizes, *flags, eps)
        self._do("gated_norm", op, num_rows, tensors)
        return out


def _check_rows(*inputs: Tensor) -> None:
    for x in inputs:
        assert x.dtype == torch.float32 and x.stride(1) == 1, "rows as a linear writes them"
