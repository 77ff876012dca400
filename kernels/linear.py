"""A linear layer whose every row comes out the same, bit for bit, whatever rows stand beside it.

A weight lies as it is, or in oneDNN's blocked layout, 2x faster than F.linear for one row, or in
panels, which kernels.native multiplies, of the weights themselves or of codes of them.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# Matrix libraries pick their inner kernel by the number of rows, and each kernel adds in its own
# order. Measured on AVX-512 (oneDNN 3.12, MKL 2024.2): packed weights have the classes {1} and
# {2, ...}, MKL's fp32 the classes {1}, {2, 3} and {4, ...}. Padding up to the last class makes one.
_MIN_ROWS_PACKED = 2
_MIN_ROWS_PLAIN = 4
# That is of AMD's CPUs; on Intel's the order of MKL depends on more, as it does with several
# threads, and below 12 output features on where in memory the rows start. oneDNN, slower on small
# products, does none of this in AVX-512; in AMX 64 rows of 1,536 inputs have other bits than 32.
_MIN_OUT_FEATURES = 16
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # read at its first product
_SMALL_BLOCK = 32  # rows; fewer are padded to a power of two instead of being cut further
_LARGE_BLOCK = 512  # rows


@dataclass(frozen=True, slots=True)
class ExponentCode:
    """What belongs to panels that are coded; kernels.native.exponent_coding makes it."""

    tables: Tensor  # [panels, 16] uint8
    outliers: Tensor  # [panels, max_outliers, 2] int32: place and word
    num_outliers: Tensor  # [panels] int32

    @property
    def num_bytes(self) -> int:
        return self.tables.nbytes + self.outliers.nbytes + self.num_outliers.nbytes


@dataclass(frozen=True, slots=True)
class SharedInputs:
    """Which inputs a rank has, where ranks share all of a linear's."""

    first: int
    total: int  # of all ranks


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """The weight [out_features, in_features] and bias of a linear layer, ready for use."""

    data: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int
    dtype: torch.dtype  # of the rows that it is multiplied with
    layout: Literal["plain", "onednn", "panels", "int8_panels", "int4_panels"] = "plain"
    code: ExponentCode | None = None
    scales: Tensor | None = None  # [N] float32, of int8 panels, with their padding
    is_rotated: bool = False  # of int8: see kernels.quantized
    # Its scales are made for the inputs of all ranks, which add up their sums before they scale
    # them; None: this rank has all inputs, or scales of its own.
    shared: SharedInputs | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether codes of the weight are multiplied."""
        return self.layout in ("int8_panels", "int4_panels")

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias, a layout's padding with them."""
        other_bytes = 0 if self.bias is None else self.bias.nbytes
        if self.code is not None:
            other_bytes += self.code.num_bytes
        if self.scales is not None:
            other_bytes += self.scales.nbytes
        if self.layout != "onednn":
            return self.data.nbytes + other_bytes
        packed_bytes: int = torch.ops.mkldnn._nbytes(self.data)
        return packed_bytes + other_bytes


Prepare = Callable[[Tensor, Tensor | None], LinearWeight]  # of a weight [N, K] and a bias [N]


def can_pack(weight: Tensor) -> bool:
    """Tell whether oneDNN can hold this weight in its blocked layout."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and weight.numel() > 0
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and (weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def prepare_linear(weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
    """Pack a weight for `linear`; the caller can drop its own copy afterwards.

    Args:
        weight: [N, K] float32 or bfloat16.
        bias: [N] of the same dtype, or None.
    """
    out_features, in_features = weight.shape
    if can_pack(weight):
        data = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        return LinearWeight(data, bias, in_features, out_features, weight.dtype, "onednn")
    return LinearWeight(weight.contiguous(), bias, in_features, out_features, weight.dtype)


def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """Return x @ weight.T + bias.

    Args:
        x: [T, K] of the weight's dtype; T may be 0.
        weight: N output features.

    Returns:
        [T, N], x's dtype. Row i depends on row i of x alone.
    """
    num_rows = x.shape[0]
    if num_rows == 0:
        return x.new_empty(0, weight.out_features)
    assert weight.layout in ("plain", "onednn"), "panels are for C"
    if weight.layout == "plain":
        missing = max(0, _MIN_ROWS_PLAIN - num_rows)
        padded = F.pad(x, (0, 0, 0, missing)) if missing else x
        y = batch_invariant_product(padded, weight.data)[:num_rows]
        return y if weight.bias is None else y + weight.bias
    blocks = [_multiply_block(x[start:stop], weight) for start, stop in _row_blocks(num_rows)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


@cache
def _row_blocks(num_rows: int) -> tuple[tuple[int, int], ...]:
    """Cut rows into runs whose lengths, the last one padded, are few powers of two.

    oneDNN keeps a compiled kernel of half a megabyte for every number of rows that it has seen:
    without this a server of mixed traffic grows by hundreds of megabytes.
    """
    blocks: list[tuple[int, int]] = []
    start = 0
    while num_rows - start >= _SMALL_BLOCK:
        stop = start + min(_LARGE_BLOCK, 1 << ((num_rows - start).bit_length() - 1))
        blocks.append((start, stop))
        start = stop
    if start < num_rows:
        blocks.append((start, num_rows))
    return tuple(blocks)


def _multiply_block(x: Tensor, weight: LinearWeight) -> Tensor:
    num_rows = x.shape[0]
    missing = max(_MIN_ROWS_PACKED, 1 << (num_rows - 1).bit_length()) - num_rows
    if missing > 0:
        x = F.pad(x, (0, 0, 0, missing))
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.data, weight.bias, "none", [], "")
    return y[:num_rows] if missing > 0 else y


def batch_invariant_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [T, K] @ weight [N, K] transposed; each row has the same bits if T is 4 or more."""
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight)
    if can_pack(weight):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return product
    out_features = weight.shape[0]
    if out_features < _MIN_OUT_FEATURES:
        weight = F.pad(weight, (0, 0, 0, _MIN_OUT_FEATURES - out_features))
    return F.linear(x, weight)[:, :out_features]
