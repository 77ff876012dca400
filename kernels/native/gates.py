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
from kernels.native.ops import (
    GatedLinearOp,
    GatedOp,
    GatedQuantizedLinearOp,
    GateOp,
    LoraOp,
    linear_op,
)
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
        num_rows, width = x.shape[0], weight.out_features // 2
        if width % PANEL != 0 or not (lora is None or lora.dtype == torch.int8):
            return super().gated_linear(x, weight, activation, lora)
        out = self._out("activated", num_rows, (width,), x.dtype)
        not_written = torch.empty(0, weight.out_features)
        of_lora = LoraOp()
        kept: tuple[Tensor | None, ...] = out, None
        if lora is not None:
            of_lora, tensors = self._lora_op(not_written, x, lora, "inner")
            self._do("lora_shrink", of_lora, lora.step, tensors)
            num_bytes = self.thread_pool.library.gated_inner_row_bytes(of_lora)
            kept = out, *tensors, self._out("coded inner", num_rows, (num_bytes,), torch.uint8)
        step = num_rows if lora is None else lora.step
        gated = GatedOp(at(out), of_lora, at(kept[-1]), activation == "gelu_tanh")
        if weight.is_quantized:
            quantized, of_quantized = self._quantized_op(x, weight, not_written)
            of_codes = GatedQuantizedLinearOp(quantized, gated)
            self._do("gated_quantized_linear", of_codes, step, (*of_quantized, *kept))
        else:
            linear, of_linear = linear_op(x, weight, not_written)
            op = GatedLinearOp(linear, gated)
            self._do("gated_linear", op, step, (*of_linear, *kept))
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
