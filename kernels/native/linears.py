"""The linears of a forward pass, by the C functions of kernels.native.

Shapes: T rows, K inputs, N outputs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.experts import ExpertsWeight, RoutedRows
from kernels.linear import LinearWeight
from kernels.native.exponent_coding import encode_panels
from kernels.native.huge_pages import HugePages
from kernels.native.lora import NativeLoras
from kernels.native.op_runner import at, is_bf16
from kernels.native.ops import (
    MOST_PIECES,
    GroupedQuantizedLinearOp,
    LinearOp,
    QuantizedLinearOp,
    RowLargestOp,
    ScaleSumsOp,
    SpreadOp,
    linear_op,
    quantized_linear_op,
)
from kernels.native.packing import move_panels, pack_panels, pack_quantized, quantize_groups
from kernels.native.program import ThreadPool
from kernels.quantized import Piece, QuantizationMethod, QuantizedWeight, quantize

_WORD = 4  # bytes of what ranks sum


class NativeLinears(NativeLoras):
    """See `kernels.interface.Kernels` and `kernels.quantized.QuantizedLinears`."""

    def __init__(self, thread_pool: ThreadPool) -> None:
        super().__init__(thread_pool)
        self._memory = HugePages()

    def prepare_linear(self, weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
        packed = pack_panels(weight, bias)
        coded = encode_panels(packed, self.thread_pool, self._memory)
        return coded or move_panels(packed, self._memory)

    def quantize(
        self,
        weight: Tensor,
        method: QuantizationMethod,
        *,
        is_rotated: bool = True,
        is_coded: bool = False,
    ) -> QuantizedWeight:
        if method == "int4":
            return quantize_groups(weight, self.thread_pool, is_coded=is_coded)
        return quantize(weight, method, is_rotated=is_rotated)

    def prepare_quantized_linear(
        self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype
    ) -> LinearWeight:
        return pack_quantized([weight], bias, dtype, self._memory)

    def linear(self, x: Tensor, weight: LinearWeight, lora: Any | None = None) -> Tensor:
        y = self._rows_apart("linear", x.shape[0], weight.out_features)
        self._multiply(x, weight, lora, y)
        return y

    def partial_linear(self, x: Tensor, weight: LinearWeight, lora: Any | None = None) -> Tensor:
        # In memory that no other linear writes over, and in one piece, as ranks sum it.
        y = self._out("partial linear", x.shape[0], (weight.out_features,), torch.float32)
        self._multiply(x, weight, lora, y)
        return y

    def _multiply(self, x: Tensor, weight: LinearWeight, lora: Any | None, y: Tensor) -> None:
        is_apart = lora is not None and not lora.is_of_panels
        op, tensors = self._linear_op(x, weight, y, None if is_apart else lora)
        step = x.shape[0] if lora is None else lora.step
        name = "quantized_linear" if weight.is_quantized else "linear"
        self._do(name, op, step, tensors, is_joined=is_apart)
        if lora is not None and is_apart:  # it begins with A x, which is not made of y
            self.lora_apply(y, x, lora)

    def _linear_op(
        self, x: Tensor, weight: LinearWeight, y: Tensor, lora: Any | None = None
    ) -> tuple[LinearOp | QuantizedLinearOp, Sequence[Tensor | None]]:
        """Return a linear's op that adds a LoRA of panels, whose A x are computed now."""
        make = self._quantized_op if weight.is_quantized else linear_op
        op, tensors = make(x, weight, y)
        if lora is None:
            return op, tensors
        op.delta, of_lora = self._shrink(x, lora, op)
        return op, (*tensors, *of_lora)

    def _quantized_op(
        self, x: Tensor, weight: LinearWeight, y: Tensor, largest: Tensor | None = None
    ) -> tuple[QuantizedLinearOp, tuple[Tensor | None, ...]]:
        """Return what `quantized_linear_op` does, with memory for rows in int8."""
        op, tensors = quantized_linear_op(x, weight, y, largest)
        num_bytes = self.thread_pool.library.coded_row_bytes(op)
        coded = self._out("coded", x.shape[0], (num_bytes,), torch.uint8)
        op.coded = at(coded)
        return op, (*tensors, coded)

    def row_largest(
        self, x: Tensor, weight: LinearWeight | ExpertsWeight, rank: int, num_ranks: int
    ) -> Tensor:
        assert x.stride(1) == 1, "the inputs of a row must be contiguous"
        out = self._out("largest", x.shape[0], (num_ranks,), torch.float32)
        is_rotated = _panels_of(weight).is_rotated
        counts = x.stride(0), x.shape[1], is_bf16(x), is_rotated, rank, num_ranks
        self._do("row_largest", RowLargestOp(at(x), at(out), *counts), x.shape[0], (x, out))
        return out

    def quantized_sums(
        self,
        x: Tensor,
        weight: LinearWeight | ExpertsWeight,
        largest: Tensor,
        routed: RoutedRows | None = None,
    ) -> Tensor:
        panels = _panels_of(weight)
        sums = self._out("sums", x.shape[0], (weight.out_features,), torch.int32)
        op, tensors = self._quantized_op(x, panels, sums, largest)
        if not isinstance(weight, ExpertsWeight):
            self._do("quantized_linear", op, x.shape[0], tensors)
            return sums
        assert routed is not None, "rows of experts are routed"
        grouped = GroupedQuantizedLinearOp(op, at(routed.starts), weight.num_experts)
        self._do("grouped_quantized_linear", grouped, x.shape[0], (*tensors, routed.starts))
        return sums

    def scale_sums(
        self,
        sums: Tensor,
        weight: LinearWeight | ExpertsWeight,
        largest: Tensor,
        routed: RoutedRows | None = None,
    ) -> Tensor:
        panels = _panels_of(weight)
        assert panels.scales is not None, "a weight in int8"
        name = "partial linear" if routed is None else "grouped"
        y = self._out(name, sums.shape[0], (sums.shape[1],), torch.float32)
        starts = None if routed is None else routed.starts
        num_experts = weight.num_experts if isinstance(weight, ExpertsWeight) else 1
        tensors = sums, largest, panels.scales, panels.bias, starts, y
        padded_outputs = panels.scales.shape[0] // num_experts
        counts = largest.shape[1], sums.shape[1], padded_outputs, num_experts
        op = ScaleSumsOp(*map(at, tensors), *counts)
        self._do("scale_sums", op, sums.shape[0], tensors)
        return y

    def spread(self, x: Tensor, pieces: Sequence[Piece], width: int, name: str) -> Tensor:
        assert x.stride(1) == 1, "the features of a row must be contiguous"
        item = x.element_size()
        num_words = -(-width * item // _WORD)
        out = self._out(name, x.shape[0], (num_words,), torch.int32)
        counts = [(one.first * item, one.count * item, one.place * item) for one in pieces]
        counts += [(0, 0, 0)] * (MOST_PIECES - len(counts))
        columns = (number for column in zip(*counts, strict=True) for number in column)
        op = SpreadOp(at(x), at(out), x.stride(0) * item, num_words * _WORD, *columns)
        self._do("spread", op, x.shape[0], (x, out))
        return out


def _panels_of(weight: LinearWeight | ExpertsWeight) -> LinearWeight:
    """Return a weight, of experts that of all of them one behind the other."""
    if isinstance(weight, LinearWeight):
        return weight
    (all_experts,) = weight.linears
    return all_experts
