"""The gated activations of MLPs, by themselves or in one op with the linear before them.

Shapes: T rows, K inputs, I features of the MLP.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.elementwise import GatedActivation
from kernels.linear import LinearWeight
from kernels.native.linears import NativeLinears
from kernels.native.op_runner import at, is_bf16
from kernels.native.ops import GatedLinearOp, GatedQuantizedLinearOp, GateOp
from kernels.native.packing import PANEL


class NativeGates(NativeLinears):
    """See `kernels.interface.Kernels`."""

    def gated_linear(
        self,
        x: Tensor,
        weight: LinearWeight,
        activation: GatedActivation,
        lora: Any | None = None,
    ) -> Tensor:
        width = weight.out_features // 2
        if width % PANEL != 0 or not (lora is None or lora.is_of_panels):
            return super().gated_linear(x, weight, activation, lora)
        out = self._out("activated", x.shape[0], (width,), x.dtype)
        not_written = torch.empty(0, weight.out_features)
        linear, tensors = self._linear_op(x, weight, not_written, lora)
        quantized = weight.is_quantized
        make = GatedQuantizedLinearOp if quantized else GatedLinearOp
        op = make(linear, at(out), activation == "gelu_tanh")
        step = x.shape[0] if lora is None else lora.step
        name = "gated_quantized_linear" if quantized else "gated_linear"
        self._do(name, op, step, (*tensors, out))
        return out

    def silu_and_mul(self, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        return self._gate("silu_and_mul", gate_up, dtype)

    def gelu_tanh_and_mul(self, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        return self._gate("gelu_tanh_and_mul", gate_up, dtype)

    def swigluoai_and_mul(
        self, gate_up: Tensor, dtype: torch.dtype, alpha: float, limit: float
    ) -> Tensor:
        return self._gate("swigluoai_and_mul", gate_up, dtype, alpha, limit)

    def _gate(
        self, name: str, gate_up: Tensor, dtype: torch.dtype, alpha: float = 0, limit: float = 0
    ) -> Tensor:
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        assert gate_up.stride(1) == 1, "a row is in one piece"
        out = self._out("activated", num_rows, (width,), dtype)
        counts = gate_up.stride(0), width, is_bf16(out)
        op = GateOp(at(gate_up), at(out), *counts, alpha, limit)
        self._do(name, op, num_rows, (gate_up, out))
        return out
