"""What quantized weights mean: a part of a linear's weight in float32, of the tensors it lies in.

What is read are the codes of the part, whole words of them where they are packed, and their scales.

Shapes: R rows and C columns of the part, which are outputs and inputs of the linear; N and K all of
them; G groups of inputs.
"""

import math
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from worker.quantization.formats import (
    AWQ_ORDER,
    NF4_BLOCK,
    NF4_NESTED_BLOCK,
    AwqCodes,
    GptqCodes,
    Nf4Codes,
    PackedCodes,
    ScaledCodes,
    Stored,
    WeightFormat,
)
from worker.spans import Span

_NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
_LONGEST_STATE = 4096  # bytes


class Read(Protocol):
    """Returns a part of one of the tensors of a linear: rows, columns; of all axes behind, all."""

    def __call__(self, tensor: Stored, *spans: Span) -> Tensor: ...


def dequantize(
    weight_format: WeightFormat, read: Read, shape: tuple[int, int], rows: Span, columns: Span
) -> Tensor:
    """Return a part [R, C] float32 of a weight.

    Args:
        weight_format: how it lies in the checkpoint.
        read: reads there.
        shape: (N, K) of the whole weight.
        rows: of the part.
        columns: likewise.

    Raises:
        ValueError: if what is read is not what it must be.
    """
    stored = {one.suffix: one for one in weight_format.stored(shape)}
    part = _Part(stored, read, shape, rows, columns)
    match weight_format:
        case ScaledCodes():
            return _scaled(weight_format, part)
        case PackedCodes():
            return _packed(weight_format, part)
        case GptqCodes():
            return _gptq(weight_format, part)
        case AwqCodes():
            return _awq(weight_format, part)
        case Nf4Codes():
            return _nf4(weight_format, part)


class _Part:
    """What is asked for of one weight."""

    def __init__(
        self,
        stored: dict[str, Stored],
        read: Read,
        shape: tuple[int, int],
        rows: Span,
        columns: Span,
    ) -> None:
        self._stored = stored
        self._read = read
        self.shape = shape
        self.rows = rows
        self.columns = columns

    def read(self, suffix: str, *spans: Span) -> Tensor:
        return self._read(self._stored[suffix], *spans)

    def groups(self, size: int | None, order: str | None = None) -> tuple[Span, Tensor]:
        """Return groups that hold those of all columns, and the index [C] of each column's there.

        Args:
            size: inputs of a group; None: there is one.
            order: the tensor that says which group each input is of; None: they come in turn.

        Raises:
            ValueError: if that tensor names a group that there is not.
        """
        num_groups = 1 if size is None else -(-self.shape[1] // size)
        if order is not None:
            index = self.read(order, self.columns).long()
            if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < num_groups:
                raise ValueError(f"{order} names a group that is not one of {num_groups}")
            return Span(0, num_groups), index
        if size is None:
            return Span(0, 1), torch.zeros(len(self.columns), dtype=torch.int64)
        groups = _covering(self.columns, size)
        columns = torch.arange(self.columns.start, self.columns.stop)
        return groups, columns // size - groups.start


def _scaled(of: ScaledCodes, part: _Part) -> Tensor:
    codes = part.read("weight", part.rows, part.columns).float()
    if of.block == (None, None):
        scale = part.read(of.scale, Span(0, 1)).float()
        zero = part.read("weight_zero_point", Span(0, 1)).float() if of.has_zeros else 0.0
        return (codes - zero) * scale
    height = of.block[0]
    assert height is not None, "of a channel or a block"
    blocks = _covering(part.rows, height)
    groups, column_index = part.groups(of.block[1])
    row_index = torch.arange(part.rows.start, part.rows.stop) // height - blocks.start

    def spread(suffix: str) -> Tensor:
        return part.read(suffix, blocks, groups).float()[row_index][:, column_index]

    if of.has_zeros:
        codes = codes - spread("weight_zero_point")
    return codes * spread(of.scale)


def _packed(of: PackedCodes, part: _Part) -> Tensor:
    told = tuple(part.read("weight_shape", Span(0, 2)).tolist())
    if told != part.shape:
        raise ValueError(f"weight_shape is {list(told)}, not {list(part.shape)}")
    half = 1 << (of.bits - 1)
    in_word = 32 // of.bits
    words = part.read("weight_packed", part.rows, _covering(part.columns, in_word))
    codes = _cut(_unpack(words, of.bits), 1, part.columns, in_word) - half
    groups, index = part.groups(of.group_size, "weight_g_idx" if of.has_order else None)
    scales = part.read("weight_scale", part.rows, groups).float()
    if not of.has_zeros:
        return codes.float() * scales[:, index]
    packed = part.read("weight_zero_point", _covering(part.rows, in_word), groups)
    zeros = _cut(_unpack(packed.T, of.bits).T, 0, part.rows, in_word) - half
    return (codes - zeros[:, index]).float() * scales[:, index]


def _gptq(of: GptqCodes, part: _Part) -> Tensor:
    in_word = 32 // of.bits
    words = part.read("qweight", _covering(part.columns, in_word), part.rows)
    codes = _cut(_unpack(words.T, of.bits), 1, part.columns, in_word)
    groups, index = part.groups(of.group_size, "g_idx")
    packed = part.read("qzeros", groups, _covering(part.rows, in_word))
    zeros = _cut(_unpack(packed, of.bits), 1, part.rows, in_word) + of.zero_offset
    scales = part.read("scales", groups, part.rows).float()
    return (codes - zeros[index].T).float() * scales[index].T


def _awq(of: AwqCodes, part: _Part) -> Tensor:
    words = _covering(part.rows, len(AWQ_ORDER))
    groups, index = part.groups(of.group_size)
    codes, zeros = (
        _cut(_unpack(packed, 4, AWQ_ORDER), 1, part.rows, len(AWQ_ORDER))
        for packed in (
            part.read("qweight", part.columns, words),
            part.read("qzeros", groups, words),
        )
    )
    scales = part.read("scales", groups, part.rows).float()
    return ((codes - zeros[index]).float() * scales[index]).T


class _Nf4State(msgspec.Struct):
    """What bitsandbytes writes of a weight, as JSON."""

    quant_type: str
    blocksize: int
    shape: tuple[int, int]
    nested_blocksize: int | None = None
    nested_offset: float = 0.0


def _nf4(of: Nf4Codes, part: _Part) -> Tensor:
    state = _nf4_state(of, part)
    # All columns, whatever a rank has of them: blocks go on from row to row.
    width = part.shape[1]
    first, end = part.rows.start * width, part.rows.stop * width
    pairs = part.read("weight", _covering(Span(first, end), 2), Span(0, 1)).flatten()
    codes = torch.stack((pairs >> 4, pairs & 15), dim=1).flatten()[first % 2 :][: end - first]
    blocks = _covering(Span(first, end), NF4_BLOCK)
    scales = part.read("weight.absmax", blocks)
    if of.is_nested:
        nested = _covering(blocks, NF4_NESTED_BLOCK)
        index = torch.arange(blocks.start, blocks.stop) // NF4_NESTED_BLOCK - nested.start
        numbers = part.read("weight.nested_quant_map", Span(0, 256))
        outer = part.read("weight.nested_absmax", nested)[index]
        scales = numbers[scales.int()] * outer + state.nested_offset
    place = torch.arange(first, end) // NF4_BLOCK - blocks.start
    values = part.read("weight.quant_map", Span(0, 16))[codes.int()] * scales[place]
    return values.view(len(part.rows), width)[:, part.columns.start : part.columns.stop]


def _nf4_state(of: Nf4Codes, part: _Part) -> _Nf4State:
    written = part.read(_NF4_STATE, Span(0, _LONGEST_STATE))
    try:
        state = msgspec.json.decode(bytes(written.tolist()), type=_Nf4State)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{_NF4_STATE}: {error}") from None
    nested = NF4_NESTED_BLOCK if of.is_nested else None
    expected = ("nf4", NF4_BLOCK, part.shape, nested)
    found = (state.quant_type, state.blocksize, state.shape, state.nested_blocksize)
    if found != expected or not math.isfinite(state.nested_offset):
        raise ValueError(f"{_NF4_STATE} is {found}, not {expected}")
    return state


def _unpack(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return the codes [A, B 32 / bits] int32 of words [A, B] int32, the lowest bits first.

    With an order, where in its word's codes each one goes.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    if order is not None:
        codes = codes[..., torch.tensor(order).argsort()]
    return codes.flatten(-2)


def _covering(span: Span, size: int) -> Span:
    """Return the blocks of so many that hold a span."""
    return Span(span.start // size, -(-span.stop // size))


def _cut(codes: Tensor, axis: int, span: Span, in_word: int) -> Tensor:
    """Return the codes of a span out of those of the words that cover it."""
    return codes.narrow(axis, span.start - span.start // in_word * in_word, len(span))
