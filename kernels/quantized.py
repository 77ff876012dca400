"""Weights and rows in int8, whose products are summed exactly.

Both factors have one scale for each of what is summed over: a weight one for each output, rows one
for each row, found as they come (W8A8; LLM.int8() without outliers, arXiv 2208.07339, and
ZeroQuant, arXiv 2206.01861). The products of codes are integers, and so are their sums: the order
in which they are added, the batch, the chunk, the machine are in no bit of them.

Shapes: T rows, N outputs, K inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from kernels.experts import ExpertsWeight
from kernels.linear import LinearWeight

QuantizationMethod = Literal["int8"]

LARGEST_CODE = 127  # so that there is a -x of every x
_SMALLEST = 2.0**-100  # the largest of a row that is not taken for zeros
# Of a sum that stays below 2^31.
MAX_INPUTS = (2**31 - 1) // LARGEST_CODE**2
_AT_ONCE = 2**22  # weights: on the way one takes some 12 bytes


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight that is about scales * codes."""

    codes: Tensor  # [N, K] int8, from -127 to 127
    scales: Tensor  # [N] float32


class QuantizedLinears(Protocol):
    """What kernels that multiply quantized weights offer besides."""

    def prepare_quantized_linear(
        self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype
    ) -> LinearWeight:
        """Return a weight and bias [N] as `linear` wants them, for rows of `dtype`."""
        ...

    def prepare_quantized_experts(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> ExpertsWeight:
        """Return the weight of each expert and biases [E, N] as `grouped_linear` wants them."""
        ...


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [T, K] int8 and scales [T] float32 of rows [T, K].

    A scale is the row's largest size / 127; a code is x * (127 / largest), each operation rounded
    to float32, then rounded to the nearest integer, ties to even. A row whose largest is below
    2^-100 has codes and a scale of 0; one that holds a NaN or an infinity has the scale NaN.
    """
    x = x.float()
    largest = x.abs().amax(dim=-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    is_finite, is_zero = largest.isfinite(), largest < _SMALLEST
    top = torch.full_like(largest, LARGEST_CODE)
    scales = torch.where(is_zero, 0.0, largest / top).masked_fill_(~is_finite, torch.nan)
    inverse = torch.where(is_zero, 0.0, top / largest)
    codes = (x * inverse.unsqueeze(-1)).round_().masked_fill_(~is_finite.unsqueeze(-1), 0.0)
    return codes.to(torch.int8), scales


def quantize(weight: Tensor) -> QuantizedWeight:
    """Return a weight [N, K] of any float dtype in int8, a scale for each output.

    Raises:
        ValueError: there are more inputs than a sum of 32 bits has room for.
    """
    outputs, inputs = weight.shape
    if inputs > MAX_INPUTS:
        raise ValueError(f"a linear of {inputs} inputs is too wide for int8: {MAX_INPUTS} at most")
    codes = torch.empty(outputs, inputs, dtype=torch.int8)
    scales = torch.empty(outputs)
    step = max(1, _AT_ONCE // max(1, inputs))
    for first in range(0, outputs, step):
        here = slice(first, first + step)
        codes[here], scales[here] = quantize_rows(weight[here])
    return QuantizedWeight(codes, scales)


def dequantize(weight: QuantizedWeight) -> Tensor:
    """Return what is multiplied: scales * codes [N, K] float32."""
    return weight.codes.float() * weight.scales.unsqueeze(1)


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x [T, K] @ weight transposed + bias as [T, N] float32, as kernels.native does.

    The sum of a row's and an output's products of codes, as float32, times the row's scale, times
    the output's, plus the bias: each rounded by itself.
    """
    codes, scales = quantize_rows(x)
    sums = codes.int() @ weight.codes.int().T
    y = sums.float() * scales.unsqueeze(1) * weight.scales
    return y if bias is None else y + bias.float()
