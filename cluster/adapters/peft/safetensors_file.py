"""Reads the safetensors format out of bytes that a stranger wrote.

Owns every check of the container: header size, JSON, duplicate keys, dtypes, shapes, offsets that
must tile the file exactly. What the tensors mean is judged by `checks`.
(The safetensors package hands out no bfloat16 without torch, which the control plane never loads.)
"""

from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from cluster.adapters.adapter import Bits, Dtype
from cluster.adapters.peft.strict_json import parse_object, shown
from cluster.errors import InvalidAdapter

MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_TENSORS = 65536
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


class Tensor(msgspec.Struct, frozen=True):
    """One tensor as raw bits, a read-only view of the file's bytes."""

    dtype: Dtype
    bits: Bits


def parse_safetensors(data: bytes, where: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, sorted by name.

    `where` is put in front of every complaint.

    Raises:
        InvalidAdapter: if the bytes are not a well-formed file of bf16, f16 and f32 tensors.
    """
    header, start = _header(data, where)
    return _tensors(header, memoryview(data)[start:], where)


def parse_header(head: bytes, num_payload_bytes: int, where: str) -> dict[str, Tensor]:
    """Return the tensors that a file declares, as zeros in pages that are never touched.

    `head` is the file up to the end of its header, `num_payload_bytes` is what follows.

    Raises:
        InvalidAdapter: as `parse_safetensors`.
    """
    header, _ = _header(head, where)
    return _tensors(header, np.zeros(num_payload_bytes, np.uint8).data, where)


def _tensors(header: dict[str, Any], payload: memoryview, where: str) -> dict[str, Tensor]:
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise InvalidAdapter(f"{where}: {len(header)} tensors, over the limit of {MAX_TENSORS}")
    entries = {name: _entry(name, header[name], where) for name in sorted(header)}
    _check_tiling(entries, len(payload), where)
    return {name: _tensor(name, entry, payload, where) for name, entry in entries.items()}


def _header(data: bytes, where: str) -> tuple[dict[str, Any], int]:
    """Return (the header's JSON object, where it ends)."""
    if len(data) < 8:
        raise InvalidAdapter(f"{where}: truncated: {len(data)} bytes do not hold a header")
    size = int.from_bytes(data[:8], "little")
    if size > MAX_HEADER_BYTES:
        raise InvalidAdapter(
            f"{where}: not a safetensors file, or a damaged one: its header would take {size} "
            f"bytes, over the limit of {MAX_HEADER_BYTES}"
        )
    if len(data) < 8 + size:
        raise InvalidAdapter(
            f"{where}: truncated: the header takes {size} bytes, {len(data) - 8} are there"
        )
    return parse_object(data[8 : 8 + size], f"{where}: header"), 8 + size


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


def _tensor(name: str, entry: TensorHeader, payload: memoryview, where: str) -> Tensor:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise InvalidAdapter(
            f"{where}: tensor {shown(name)} is {shown(entry.dtype)}; LoRA tensors must be BF16, "
            "F16 or F32"
        )
    begin, end = entry.data_offsets
    item = np.dtype(_BITS[dtype])
    expected = item.itemsize
    for length in entry.shape:
        expected *= length
    if expected != end - begin:
        raise InvalidAdapter(
            f"{where}: tensor {shown(name)}: {entry.dtype} {entry.shape} takes {expected} bytes, "
            f"its offsets give it {end - begin}"
        )
    bits = np.frombuffer(payload[begin:end], item).reshape(entry.shape)
    return Tensor(dtype, bits)
