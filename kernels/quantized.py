"""Weights in int8 or int4 and rows in int8, the products of whose codes are summed exactly.

In int8 a row has one scale, found as it comes, and a weight one for each output (W8A8; LLM.int8()
without outliers, arXiv 2208.07339, and ZeroQuant, arXiv 2206.01861). So that a few large numbers
do not take the bits of all others, every group of 32 inputs is rotated first, in rows as in the
weight: the products are what they were, and each number has a part of every one of its group
(QuaRot, arXiv 2404.00456). In int4 every group has a scale in each row, and for each output a scale
and an offset (W4A8; as llama.cpp's Q4_1 times Q8_1). The products of codes are integers, and so are
their sums: the order in which they are added, the batch, the chunk, the machine are in no bit of
them. In int4 what the groups' sums stand for is added up as floats, in their order.

Shapes: T rows, N outputs, K inputs, G groups of inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
_ROTATION_SCALE = GROUP**-0.5  # of the Hadamard matrix
_LARGEST_INT4 = 15
# A group's scale is its range over 15 and one of these: with more the ends are cut, which is worth
# it where the others lie close.
_CUTS = (0.0, 1.0)
# Where numbers are what codes of at most 4 bits mean, a group's range is a whole number of their
# steps, fewer than 15 if it has not both ends: these find it, and so the same codes.
_CODED_CUTS = (*_CUTS, *(-float(missing) for missing in range(1, _LARGEST_INT4)))


@dataclass(frozen=True, slots=True)
class Piece:
    """Features that follow each other, in rows of a rank and in those of all ranks."""

    first: int
    count: int
    place: int  # of the first, in rows of all ranks


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight that is about scales * codes, in int4 scales * codes + offsets.

    One that `is_rotated` is about scales * codes once its groups are, and so are those of its rows.
    """

    method: QuantizationMethod
    codes: Tensor  # [N, K] int8, from -127 to 127, or from 0 to 15
    scales: Tensor  # [N] float32, or [N, G] bfloat16
    offsets: Tensor | None = None  # [N, G] bfloat16; of int4
    is_rotated: bool = False  # of int8


class QuantizedLinears(Protocol):
    """What kernels that multiply quantized weights offer besides.

    A weight in int8 that is `shared` by ranks takes the steps of `row_largest`, `quantized_sums`
    and `scale_sums`, with a sum over the ranks behind each of the first two. What comes of them has
    the bits that `linear` of one rank with all inputs gives. `spread` does that for LoRA and norms.
    """

    def quantize(
        self,
        weight: Tensor,
        method: QuantizationMethod,
        *,
        is_rotated: bool = True,
        is_coded: bool = False,
    ) -> QuantizedWeight:
        """Do what `kernels.quantized.quantize` does."""
        ...

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

    def row_largest(
        self, x: Tensor, weight: LinearWeight | ExpertsWeight, rank: int, num_ranks: int
    ) -> Tensor:
        """Return the largest size of each row of x [T, K] in the column of a rank, [T, ranks].

        It is that of rows as they are multiplied with the weight. Other columns are 0, float32; the
        sum over ranks is what the others take.
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
    ) -> Tensor:
        """Return what sums stand for, [T, N] float32, with the bias."""
        ...

    def spread(self, x: Tensor, pieces: Sequence[Piece], width: int, name: str) -> Tensor:
        """Return the bytes of pieces of x [T, K] where they stand in all ranks' rows, [T, W] int32.

        Other bytes are 0, so the sum over ranks has all pieces, in x's dtype, and less than a word
        behind them.

        Args:
            x: any dtype; its features are contiguous.
            pieces: two at most.
            width: features of a row of all ranks.
            name: of the memory that it takes, which nothing else may have while it is wanted.
        """
        ...


@dataclass(frozen=True, slots=True)
class Quantizer:
    """How the linears of a model are quantized while it is loaded."""

    method: QuantizationMethod
    linears: QuantizedLinears

    def head(self, weight: Tensor, dtype: torch.dtype) -> LinearWeight:
        """Return the lm_head, of a weight [V, H]."""
        quantized = self.linears.quantize(weight, HEAD_METHOD)
        return self.linears.prepare_quantized_linear(quantized, None, dtype)


def rotate(x: Tensor) -> Tensor:
    """Return rows [T, K] as float32, their whole groups rotated; twice is as good as never.

    A group is multiplied by the Hadamard matrix of Sylvester / sqrt(GROUP): pairs of numbers that
    are GROUP / 2 apart become their sum and difference, then those half as far apart, down to
    neighbours; then all are multiplied by 1 / sqrt(GROUP). Each operation is rounded to float32.
    """
    whole = x.shape[1] // GROUP * GROUP
    rows = x.float()
    groups = rows[:, :whole].reshape(-1, GROUP)
    apart = GROUP // 2
    while apart:
        first, second = groups.view(-1, 2, apart).unbind(1)
        groups = torch.stack([first + second, first - second], dim=1)
        apart //= 2
    rotated = (groups * _ROTATION_SCALE).view(x.shape[0], whole)
    return torch.cat([rotated, rows[:, whole:]], dim=1)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [T, K] int8 and scales [T] float32 of rows [T, K] as they are.

    A scale is the row's largest size / 127; a code is x * (127 / largest), each operation rounded
    to float32, then rounded to the nearest integer, ties to even. A row whose largest is below
    2^-100 has codes and a scale of 0; one that holds a NaN or an infinity has the scale NaN.
    """
    x = x.float()
    scales, inverse = row_scales(x)
    codes = (x * inverse).round_().masked_fill_(scales.isnan().unsqueeze(-1), 0.0)
    return codes.to(torch.int8), scales


def row_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales [...] and 127 / the largest size [..., 1] of float32 rows [..., K].

    A scale is the largest size / 127; 0 where that is below 2^-100, NaN where it is not finite.
    """
    largest = x.abs().amax(dim=-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    is_finite, is_zero = largest.isfinite(), largest < _SMALLEST
    top = torch.full_like(largest, LARGEST_CODE)
    scales = torch.where(is_zero, 0.0, largest / top).masked_fill_(~is_finite, torch.nan)
    inverse = torch.where(is_zero, 0.0, top / largest)
    return scales, inverse.unsqueeze(-1)


def quantize(
    weight: Tensor,
    method: QuantizationMethod,
    *,
    is_rotated: bool = True,
    is_coded: bool = False,
) -> QuantizedWeight:
    """Return a weight [N, K] of any float dtype in fewer bits.

    In int8 its groups, and those of its rows, are rotated if `is_rotated`. In int4 a weight that
    `is_coded`, so that its numbers are what other codes mean, keeps these where 32 inputs share a
    scale and there are at most 16 codes.

    Raises:
        ValueError: there are more inputs than a sum of 32 bits has room for.
    """
    outputs, inputs = weight.shape
    if method == "int8" and inputs > MAX_INPUTS:
        raise ValueError(
            f"a linear of {inputs} inputs is too wide for {method}: {MAX_INPUTS} at most"
        )
    codes = torch.empty(outputs, inputs, dtype=torch.int8)
    step = max(1, _AT_ONCE // max(1, inputs))
    pieces = [slice(first, first + step) for first in range(0, outputs, step)]
    if method == "int8":
        scales = torch.empty(outputs)
        for here in pieces:
            rows = rotate(weight[here]) if is_rotated else weight[here]
            codes[here], scales[here] = quantize_rows(rows)
        return QuantizedWeight(method, codes, scales, is_rotated=is_rotated)
    of_groups = torch.empty(2, outputs, -(-inputs // GROUP), dtype=torch.bfloat16)
    for here in pieces:
        cuts = _CODED_CUTS if is_coded else _CUTS
        codes[here], of_groups[:, here] = _quantize_groups(weight[here], cuts)
    return QuantizedWeight(method, codes, of_groups[0], of_groups[1])


def _quantize_groups(weight: Tensor, cuts: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return codes [N, K] int8, and scales and offsets [2, N, G] bfloat16, of a weight in groups.

    Codes are first taken by scales of several sizes. For each the scale and the offset are then
    those that leave the least squared error with these codes (as llama.cpp's make_qkx2_quants), and
    the codes the nearest by them; the first of the scales that leave the least is taken. A group
    whose numbers are equal has codes and a scale of 0; one with a NaN or an infinity the scale NaN.
    """
    x = weight.float()
    missing = -x.shape[1] % GROUP  # the last number once more: as good as not there
    if missing:
        x = torch.cat([x, x[:, -1:].expand(-1, missing)], dim=1)
    groups = x.view(x.shape[0], -1, GROUP)
    is_finite = groups.isfinite().all(-1, keepdim=True)
    groups = groups.masked_fill(~is_finite, 0.0)
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    mean = _sum(groups) / GROUP
    best = torch.zeros_like(groups), torch.zeros_like(least), least.bfloat16().float()
    error = _sum((best[2] - groups).square())
    for cut in cuts:
        scale = (most - least) / (_LARGEST_INT4 + cut)
        codes = _nearest(groups, scale, least + scale * (max(cut, 0.0) / 2))
        about = codes - _sum(codes) / GROUP
        scale = (_sum(about * groups) / _sum(about.square())).bfloat16().float()
        offset = (mean - scale * (_sum(codes) / GROUP)).bfloat16().float()
        codes = _nearest(groups, scale, offset)
        off = _sum((codes * scale + offset - groups).square())
        is_better = (off < error) & (scale > 0)  # false where the scale is none
        error = torch.where(is_better, off, error)
        best = (
            torch.where(is_better, codes, best[0]),
            torch.where(is_better, scale, best[1]),
            torch.where(is_better, offset, best[2]),
        )
    codes, scale, offset = best
    of_groups = torch.stack([scale.masked_fill(~is_finite, torch.nan), offset]).squeeze(-1)
    return codes.flatten(1)[:, : weight.shape[1]].to(torch.int8), of_groups.bfloat16()


def _nearest(x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return ((x - offset) / scale).round_().clamp_(0, _LARGEST_INT4)


def _sum(groups: Tensor) -> Tensor:
    """Return [..., 1] of [..., GROUP], added up in an order that no machine changes."""
    while groups.shape[-1] > 1:
        half = groups.shape[-1] // 2
        groups = groups[..., :half] + groups[..., half:]
    return groups


def _in_groups(x: Tensor) -> Tensor:
    """Return [T, G, GROUP] of [T, K], with zeros behind the last input."""
    padded = F.pad(x, (0, -x.shape[1] % GROUP))
    return padded.view(x.shape[0], padded.shape[1] // GROUP, GROUP)


def columns_of(weight: QuantizedWeight, columns: slice) -> QuantizedWeight:
    """Return some inputs of a weight in int8, with the scales of all.

    Groups of inputs lie in them as they do in all, or are not rotated.
    """
    assert weight.method == "int8", "groups of inputs have scales of their own"
    is_whole = columns.start % GROUP == 0 and (
        columns.stop % GROUP == 0 or columns.stop == weight.codes.shape[1]
    )
    assert is_whole or not weight.is_rotated, "whole groups, or groups as they are"
    return replace(weight, codes=weight.codes[:, columns])


def dequantize(weight: QuantizedWeight) -> Tensor:
    """Return what a weight stands for, [N, K] float32."""
    if weight.offsets is None:
        codes = weight.codes.float() * weight.scales.unsqueeze(1)
        return rotate(codes) if weight.is_rotated else codes
    scales, offsets = weight.scales.float().unsqueeze(-1), weight.offsets.float().unsqueeze(-1)
    groups = _in_groups(weight.codes.float()) * scales + offsets
    return groups.flatten(1)[:, : weight.codes.shape[1]]


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x [T, K] @ weight transposed + bias as [T, N] float32, as kernels.native does.

    In int8 it is the sum of products of codes, as float32, times the row's scale, times the
    output's, plus the bias; each operation is rounded by itself. In int4 each group adds two
    products, each of which is rounded together with its sum: the output's offset times (the row's
    scale * the sum of its codes), then the sum of products of codes times (the output's scale * the
    row's).
    """
    if weight.offsets is None:
        codes, scales = quantize_rows(rotate(x) if weight.is_rotated else x)
        sums = codes.int() @ weight.codes.int().T
        y = sums.float() * scales.unsqueeze(1) * weight.scales
        return y if bias is None else y + bias.float()
    rows = _in_groups(x.float())
    codes, scales = quantize_rows(rows.flatten(0, 1))
    codes, scales = codes.view(rows.shape), scales.view(rows.shape[:2])
    of_weight = _in_groups(weight.codes.int())
    y = torch.zeros(x.shape[0], weight.codes.shape[0])
    for group in range(rows.shape[1]):
        of_rows, row_scales = codes[:, group].int(), scales[:, group].unsqueeze(1)
        row_sums = row_scales * of_rows.sum(1, keepdim=True).float()
        y = _multiply_add(weight.offsets[:, group].float(), row_sums, y)
        sums = (of_rows @ of_weight[:, group].T).float()
        y = _multiply_add(sums, weight.scales[:, group].float() * row_scales, y)
    return y if bias is None else y + bias.float()


def _multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c of float32, rounded once but where the sum lies next to a tie."""
    total: Tensor = a.double() * b.double() + c.double()
    return total.float()
