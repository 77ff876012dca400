"""The linears of a forward pass, by the C functions of kernels.native.

Shapes: T rows, K inputs, N outputs.
"""

import torch
from torch import Tensor

from kernels.linear import LinearWeight
from kernels.native.exponent_coding import encode_panels
from kernels.native.huge_pages import HugePages
from kernels.native.op_runner import OpRunner
from kernels.native.ops import linear_op, quantized_linear_op
from kernels.native.packing import move_panels, pack_panels, pack_quantized
from kernels.native.program import ThreadPool
from kernels.quantized import QuantizedWeight


class NativeLinears(OpRunner):
    """See `kernels.interface.Kernels` and `kernels.quantized.QuantizedLinears`."""

    def __init__(self, thread_pool: ThreadPool) -> None:
        super().__init__(thread_pool)
        self._memory = HugePages()

    def prepare_linear(self, weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
        packed = pack_panels(weight, bias)
        coded = encode_panels(packed, self.thread_pool, self._memory)
        return coded or move_panels(packed, self._memory)

    def prepare_quantized_linear(
        self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype
    ) -> LinearWeight:
        return pack_quantized([weight], bias, dtype, self._memory)

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        return self._linear("linear", x, weight)

    def partial_linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        return self._linear("partial linear", x, weight)  # which no other linear writes over

    def _linear(self, name: str, x: Tensor, weight: LinearWeight) -> Tensor:
        y = self._out(name, x.shape[0], (weight.out_features,), torch.float32)
        if weight.is_quantized:
            quantized, tensors = quantized_linear_op(x, weight, y)
            self._do("quantized_linear", quantized, x.shape[0], tensors)
            return y
        op, tensors = linear_op(x, weight, y)
        self._do("linear", op, x.shape[0], tensors)
        return y
