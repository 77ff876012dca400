"""Reads the safetensors format out of bytes that a stranger wrote.

Owns every check of the container: header size, JSON, duplicate keys, dtypes, shapes, offsets that
must tile the file exactly. What the tensors mean is judged by `checks`.
(The safetensors package hands out no bfloat16 without torch, which the control plane never loads.)
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from cluster.adapters.adapter import ITEM_BYTES, Bits, Dtype
from cluster.adapters.peft.strict_json import parse_object, shown
from cluster.errors import InvalidAdapter

MAX_HEADER_BYTES = 4 * 1024 * 1024  # of some 25,000 tensors; a model of 128 layers has 2,700
MAX_TENSORS = 16384
MAX_OBJECTS = 2 * MAX_TENSORS  # each tensor is one; configurations in the metadata spell some
MAX_DIMENSIONS = 8
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]  # no product of MAX_DIMENSIONS is unprintable

_DTYPES: dict[str, Dtype] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_BITS: dict[Dtype, Literal["<u2", "<u4"]] = {
    "bfloat16": "<u2",
    "float16": "<u2",
    "float32": "<u4",
}


class TensorHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the header says of one tensor; offsets count from the end of the header."""

    dtype: str
    shape: Annotated[list[Size], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[Size, Size]


class TensorSpan(msgspec.Struct, frozen=True, gc=False):
    """What one tensor is, and where it lies behind the header."""

    dtype: Dtype
    shape: tuple[int, ...]
    begin: int  # bytes
    end: int


class Tensor(msgspec.Struct, frozen=True):
    """One tensor as raw bits, a read-only view of the file's bytes."""

    dtype: Dtype
    bits: Bits


def parse_spans(head: bytes, num_payload_bytes: int, where: str) -> dict[str, TensorSpan]:
    """Return where the tensors of a safetensors file lie, by name, sorted by name.

    Args:
        head: the file up to the end of its header, or what there is of it.
        num_payload_bytes: that follow it.
        where: is put in front of every complaint.

    Raises:
        InvalidAdapter: if that is not a well-formed file of bf16, f16 and f32 tensors.
    """
    header = _header(head, where)
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise InvalidAdapter(f"{where}: {len(header)} tensors, over the limit of {MAX_TENSORS}")
    entries = {name: _entry(name, header[name], where) for name in sorted(header)}
    _check_tiling(entries, num_payload_bytes, where)
    return {name: _span(name, entry, where) for name, entry in entries.items()}


def view_tensors(spans: Mapping[str, TensorSpan], payload: bytes | memoryview) -> dict[str, Tensor]:
    """Return the tensors that lie in what follows a header, as views of it."""
    view = memoryview(payload)
    return {
        name: Tensor(
            span.dtype,
            np.frombuffer(view[span.begin : span.end], _BITS[span.dtype]).reshape(span.shape),
        )
        for name, span in spans.items()
    }


def header_size(first: bytes, num_bytes: int, where: str) -> int:
    """Return how many bytes the header of a file takes behind its first eight.

    Args:
        first: the first eight bytes of the file, or what there is of them.
        num_bytes: of the file, or of what of it is there.
        where: is put in front of every complaint.

    Raises:
        InvalidAdapter: if it is more than may be, or than there is.
    """
    if len(first) < 8:
        raise InvalidAdapter(f"{where}: truncated: {len(first)} bytes do not hold a header")
    size = int.from_bytes(first, "little")
    if size > MAX_HEADER_BYTES:
        raise InvalidAdapter(
            f"{where}: not a safetensors file, or a damaged one: its header would take {size} "
            f"bytes, over the limit of {MAX_HEADER_BYTES}"
        )
    if num_bytes < 8 + size:
        raise InvalidAdapter(
            f"{where}: truncated: the header takes {size} bytes, {num_bytes - 8} are there"
        )
    return size


def _header(data: bytes, where: str) -> dict[str, Any]:
    """Return the header's JSON object."""
    size = header_size(data[:8], len(data), where)
    # Before they are made, which takes a hundred bytes of memory for each of theirs.
    num_objects = data.count(b"{", 8, 8 + size)
    if num_objects > MAX_OBJECTS:
        raise InvalidAdapter(
            f"{where}: header: {num_objects} objects, over the limit of {MAX_TENSORS} tensors"
        )
    return parse_object(data[8 : 8 + size], f"{where}: header")


def _entry(name: str, raw: object, where: str) -> TensorHeader:
    try:
        entry = msgspec.convert(raw, TensorHeader)
    except msgspec.ValidationError as error:
        raise InvalidAdapter(f"{where}: tensor {shown(name)}: {shown(str(error))}") from error
    begin, end = entry.data_offsets
    if begin > end:
        raise InvalidAdapter(f"{where}: tensor {shown(name)}: it ends before it begins")
    return entry


def _check_tiling(entries: dict[str, TensorHeader], size: int, where: str) -> None:
    """Refuse tensors that overlap, leave holes or reach beyond the file."""
    position = 0
    for name in sorted(entries, key=lambda name: (entries[name].data_offsets, name)):
        begin, end = entries[name].data_offsets
        if end > size:
            raise InvalidAdapter(
                f"{where}: truncated: tensor {shown(name)} ends at byte {end} of the data, but "
                f"only {size} are there"
            )
        if begin != position:
            fault = "overlaps the one before it" if begin < position else "leaves a hole before it"
            raise InvalidAdapter(f"{where}: tensor {shown(name)} {fault}")
        position = end
    if position != size:
        raise InvalidAdapter(f"{where}: {size - position} bytes after the last tensor")


def _span(name: str, entry: TensorHeader, where: str) -> TensorSpan:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise InvalidAdapter(
            f"{where}: tensor {shown(name)} is {shown(entry.dtype)}; LoRA tensors must be BF16, "
            "F16 or F32"
        )
    begin, end = entry.data_offsets
    expected = ITEM_BYTES[dtype]
    for length in entry.shape:
        expected *= length
    if expected != end - begin:
        raise InvalidAdapter(
            f"{where}: tensor {shown(name)}: {entry.dtype} {entry.shape} takes {expected} bytes, "
            f"its offsets give it {end - begin}"
        )
    return TensorSpan(dtype, tuple(entry.shape), begin, end)


def common_dtype(tensors: Mapping[str, Tensor]) -> Dtype:
    """Return the dtype of all tensors, float32 if they differ: widening loses nothing."""
    dtypes = {tensor.dtype for tensor in tensors.values()}
    return dtypes.pop() if len(dtypes) == 1 else "float32"
