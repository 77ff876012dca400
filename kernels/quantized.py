"""Weights in int8 or int4 and rows in int8, the products of whose codes are summed exactly.

Rows have one scale each, found as they come. A weight in int8 has one for each output (W8A8;
LLM.int8() without outliers, arXiv 2208.07339, and ZeroQuant, arXiv 2206.01861), one in int4 for
each output and group of 32 inputs (W4A8; as llama.cpp's Q4_0 times Q8_0). The products of codes are
integers, and so are their sums: the order in which they are added, the batch, the chunk, the
machine are in no bit of them. In int4 the groups' sums are added up as floats, in their order.

Shapes: T rows, N outputs, K inputs, G groups of inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.experts import ExpertsWeight, RoutedRows
from kernels.linear import LinearWeight

QuantizationMethod = Literal["int8", "int4"]

HEAD_METHOD: QuantizationMethod = "int8"  # of the lm_head, whichever that of layers is

LARGEST_CODE = 127  # so that there is a -x of every x
_SMALLEST = 2.0**-100  # the largest of a row that is not taken for zeros
# Of a sum that stays below 2^31.
MAX_INPUTS = (2**31 - 1) // LARGEST_CODE**2
_AT_ONCE = 2**22  # weights: on the way one takes some 20 bytes
GROUP = 32  # inputs
# A group's scale is its largest number over one of these, that which leaves the least error: beyond
# 8 the largest is cut, which is worth it where others are small. Measured on SmolLM2-135M: errors
# of 7.9% of the weights' size, 8.7% with -8 alone, 7.7% with 16 of them.
_CODES_OF_LARGEST = (-8.0, -8.6, -9.2, -7.4, -6.8)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight that is about scales * codes."""

    method: QuantizationMethod
    codes: Tensor  # [N, K] int8, from -127 to 127, or from -8 to 7
    scales: Tensor  # [N] float32, or [N, G] bfloat16


class QuantizedLinears(Protocol):
    """What kernels that multiply quantized weights offer besides.

    A weight in int8 that is shared by ranks, `is_shared`, takes the steps of `row_largest`,
    `quantized_sums` and `scale_sums`, with a sum over the ranks behind each of the first two. What
    comes of them has the bits that `linear` of one rank with all inputs gives.
    """

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

    def row_largest(self, x: Tensor, rank: int, num_ranks: int) -> Tensor:
        """Return the largest size of each row of x [T, K] in the column of a rank, [T, ranks].

        Other columns are 0, float32; the sum over ranks is what the others take.
        """
        ...

    def quantized_sums(
        self,
        x: Tensor,
        weight: LinearWeight | ExpertsWeight,
        largest: Tensor,
        routed: RoutedRows | None = None,
    ) -> Tensor:
        """Return the sums of products of codes [T, N] int32 over this rank's inputs.

        Of experts each row's own, as `routed` says.
        """
        ...

    def scale_sums(
        self,
        sums: Tensor,
        weight: LinearWeight | ExpertsWeight,
        largest: Tensor,
        routed: RoutedRows | None = None,
        *,
        is_zero: bool = False,
    ) -> Tensor:
        """Return what sums stand for, [T, N] float32, with the bias.

        With `is_zero` nothing but zeros, where another rank brings it into a further sum.
        """
        ...


@dataclass(frozen=True, slots=True)
class Quantizer:
    """How the linears of a model are quantized while it is loaded."""

    method: QuantizationMethod
    linears: QuantizedLinears
    # Whether linears whose inputs ranks share have the scales of all inputs, for sums that do not
    # depend on how many ranks there are.
    is_shared: bool = False

    def __post_init__(self) -> None:
        assert not self.is_shared or self.method == "int8", "sums of floats depend on their order"

    def linear(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> LinearWeight:
        """Return a linear of a layer, of a weight [N, K] and a bias [N], for rows of `dtype`."""
        return self.linears.prepare_quantized_linear(quantize(weight, self.method), bias, dtype)

    def head(self, weight: Tensor, dtype: torch.dtype) -> LinearWeight:
        """Return the lm_head, of a weight [V, H]."""
        return self.linears.prepare_quantized_linear(quantize(weight, HEAD_METHOD), None, dtype)


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


def quantize(weight: Tensor, method: QuantizationMethod) -> QuantizedWeight:
    """Return a weight [N, K] of any float dtype in fewer bits.

    Raises:
        ValueError: there are more inputs than a sum of 32 bits has room for.
    """
    outputs, inputs = weight.shape
    if inputs > MAX_INPUTS:
        raise ValueError(
            f"a linear of {inputs} inputs is too wide for {method}: {MAX_INPUTS} at most"
        )
    codes = torch.empty(outputs, inputs, dtype=torch.int8)
    if method == "int8":
        scales = torch.empty(outputs)
    else:
        scales = torch.empty(outputs, -(-inputs // GROUP), dtype=torch.bfloat16)
    quantize_some = quantize_rows if method == "int8" else _quantize_groups
    step = max(1, _AT_ONCE // max(1, inputs))
    for first in range(0, outputs, step):
        here = slice(first, first + step)
        codes[here], scales[here] = quantize_some(weight[here])
    return QuantizedWeight(method, codes, scales)


def _quantize_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [N, K] int8 and scales [N, G] bfloat16 of a weight [N, K] in groups.

    Of several scales that which leaves the least squared error, the first of equals. A group whose
    largest is below 2^-100 has codes and a scale of 0; one with a NaN or an infinity the scale NaN.
    """
    groups = _in_groups(weight.float())
    sizes = groups.abs()
    largest = groups.gather(-1, sizes.argmax(-1, keepdim=True))
    is_finite = groups.isfinite().all(-1, keepdim=True)
    is_zero = largest.abs() < _SMALLEST
    codes, scales = torch.zeros_like(groups), torch.zeros_like(largest)
    least = torch.full_like(largest, torch.inf)
    for code in _CODES_OF_LARGEST:
        scale = (largest / code).bfloat16().float()
        some = (groups / scale).round_().clamp_(-8, 7)
        off = (some * scale - groups).square_().sum(-1, keepdim=True)
        is_better = off < least
        codes = torch.where(is_better, some, codes)
        scales, least = torch.where(is_better, scale, scales), torch.where(is_better, off, least)
    is_nothing = is_zero | ~is_finite
    codes = codes.masked_fill_(is_nothing, 0.0).flatten(1)[:, : weight.shape[1]]
    scales = scales.masked_fill_(is_zero, 0.0).masked_fill_(~is_finite, torch.nan)
    return codes.to(torch.int8), scales.squeeze(-1).bfloat16()


def _in_groups(x: Tensor) -> Tensor:
    """Return [T, G, GROUP] of [T, K], with zeros behind the last input."""
    padded = F.pad(x, (0, -x.shape[1] % GROUP))
    return padded.view(x.shape[0], padded.shape[1] // GROUP, GROUP)


def columns_of(weight: QuantizedWeight, columns: slice) -> QuantizedWeight:
    """Return some inputs of a weight in int8, with the scales of all."""
    assert weight.method == "int8", "groups of inputs have scales of their own"
    return QuantizedWeight("int8", weight.codes[:, columns], weight.scales)


def dequantize(weight: QuantizedWeight) -> Tensor:
    """Return what is multiplied: scales * codes [N, K] float32."""
    if weight.method == "int8":
        return weight.codes.float() * weight.scales.unsqueeze(1)
    groups = _in_groups(weight.codes.float()) * weight.scales.float().unsqueeze(-1)
    return groups.flatten(1)[:, : weight.codes.shape[1]]


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x [T, K] @ weight transposed + bias as [T, N] float32, as kernels.native does.

    In int8 the sum of a row's and an output's products of codes, as float32, times the row's scale,
    times the output's, plus the bias; in int4 the sum over groups of such sums times their scales,
    one behind the other from 0 on, times the row's scale, plus the bias. Each operation is rounded
    by itself.
    """
    codes, scales = quantize_rows(x)
    if weight.method == "int8":
        sums = codes.int() @ weight.codes.int().T
        y = sums.float() * scales.unsqueeze(1) * weight.scales
    else:
        total = torch.zeros(x.shape[0], weight.codes.shape[0])
        of_rows, of_weight = _in_groups(codes.int()), _in_groups(weight.codes.int())
        for group in range(of_rows.shape[1]):
            sums = of_rows[:, group] @ of_weight[:, group].T
            total = total + sums.float() * weight.scales[:, group].float()
        y = total * scales.unsqueeze(1)
    return y if bias is None else y + bias.float()
