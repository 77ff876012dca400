"""How a rank's linears become ready for use: packed as they are, or quantized.

Shapes: N outputs, K inputs, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.experts import ExpertsWeight, PrepareExperts
from kernels.linear import LinearWeight, Prepare, SharedInputs
from kernels.quantized import QuantizedWeight, Quantizer, columns_of
from worker.spans import Span
from worker.weights.partition import Partition


@dataclass(frozen=True, slots=True)
class LinearPreparer:
    """Prepares linears by the names of their modules."""

    part: Partition
    dtype: torch.dtype  # of the rows that linears are multiplied with
    prepare: Prepare
    prepare_experts: PrepareExperts
    quantizer: Quantizer | None  # None: none is quantized
    is_coded: bool = False  # whether weights are what 16 codes mean, as far as they share a scale

    @property
    def read_dtype(self) -> torch.dtype:
        """In which weights are wanted: codes are made of all digits."""
        return self.dtype if self.quantizer is None else torch.float32

    @property
    def has_shared_scales(self) -> bool:
        """Whether linears whose inputs ranks share have the scales of all."""
        is_exact = self.part.has_exact_sums
        assert not is_exact or (self.quantizer is not None and self.quantizer.method == "int8"), (
            "sums of floats depend on their order"
        )
        return is_exact

    def linear(self, name: str, weight: Tensor, bias: Tensor | None) -> LinearWeight:
        """Return a linear of a weight [N, K] and a bias [N], quantized where linears are."""
        if self.quantizer is None:
            return self.prepare(weight, bias)
        linears = self.quantizer.linears
        return linears.prepare_quantized_linear(self.quantized(name, weight), bias, self.dtype)

    def shared(self, name: str, weight: Tensor, columns: Span, bias: Tensor | None) -> LinearWeight:
        """Return some inputs of a weight [N, K] with the scales of all, which ranks share."""
        assert self.quantizer is not None, "floats are summed as they are"
        quantized = self.quantized(name, weight, columns)
        prepared = self.quantizer.linears.prepare_quantized_linear(quantized, bias, self.dtype)
        return replace(prepared, shared=SharedInputs(columns.start, weight.shape[1]))

    def head(self, weight: Tensor) -> LinearWeight:
        """Return the lm_head, of a weight [V, H]."""
        if self.quantizer is None:
            return self.prepare(weight, None)
        return self.quantizer.head(weight, self.dtype)

    def quantized(self, name: str, weight: Tensor, columns: Span | None = None) -> QuantizedWeight:
        """Return a weight [N, K] in fewer bits, of it some `columns` where ranks share all."""
        assert self.quantizer is not None, "linears are quantized"
        quantize, method = self.quantizer.linears.quantize, self.quantizer.method
        is_rotated = self.part.has_whole_groups(name)
        whole = quantize(weight, method, is_rotated=is_rotated, is_coded=self.is_coded)
        if columns is None:
            return whole
        return columns_of(whole, slice(columns.start, columns.stop))

    def quantized_experts(
        self,
        weights: Sequence[QuantizedWeight],
        bias: Tensor | None,
        shared: SharedInputs | None = None,
    ) -> ExpertsWeight:
        """Return experts of such weights and biases [E, N], or of some inputs as `shared` does."""
        assert self.quantizer is not None, "linears are quantized"
        prepared = self.quantizer.linears.prepare_quantized_experts(weights, bias, self.dtype)
        linears = tuple(replace(one, shared=shared) for one in prepared.linears)
        return replace(prepared, linears=linears)
