"""Reads the header of a safetensors file that a stranger wrote, and nothing else of the file.

Owns every check of the container: the header's size, its JSON, dtypes, shapes, and offsets that
must tile the file exactly. What is let pass, the safetensors package opens. What the tensors mean
is judged by `checkpoint_files`.
"""

import json
import math
from pathlib import Path
from typing import Annotated

import msgspec

from worker.regular_file import open_regular_file

MAX_HEADER_BYTES = 2**25  # of some 250,000 tensors
MAX_DIMENSIONS = 8
_SHOWN = 120  # characters of a stranger's text that a message repeats
_METADATA = "__metadata__"
_DTYPES = {  # by bits of an element
    8: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"),
    16: ("U16", "I16", "F16", "BF16"),
    32: ("U32", "I32", "F32"),
    64: ("U64", "I64", "F64"),
}
_BITS = {dtype: bits for bits, dtypes in _DTYPES.items() for dtype in dtypes}

Size = Annotated[int, msgspec.Meta(ge=0, le=2**48)]


class TensorHeader(msgspec.Struct, frozen=True):
    """What the header says of one tensor; offsets count from the end of the header."""

    dtype: str
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[Size, Size]


def shown(name: str) -> str:
    """Return a name as a message may repeat it: printable, of bounded length."""
    text = ascii(name)[1:-1]
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Return what a file says of its tensors, by name.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a whole and well-formed safetensors file; names it.
    """
    with open_regular_file(path) as (file, size):
        head = file.read(8)
        num_bytes = int.from_bytes(head, "little")
        if len(head) < 8:
            raise ValueError(f"{path.name} is truncated: its {size} bytes do not hold a header")
        if num_bytes > MAX_HEADER_BYTES:
            raise ValueError(
                f"{path.name} is no safetensors file, or a damaged one: its header would take "
                f"{num_bytes} bytes, over the limit of {MAX_HEADER_BYTES}"
            )
        if 8 + num_bytes > size:
            raise ValueError(
                f"{path.name} is truncated: its header takes {num_bytes} bytes, and {size - 8} "
                "are there"
            )
        header = file.read(num_bytes)
    try:
        tensors = _parsed(header)
        _check_tiling(tensors, size - 8 - num_bytes)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    return tensors


def _parsed(header: bytes) -> dict[str, TensorHeader]:
    if header[:1] != b"{":
        raise ValueError("its header is no JSON object")
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        if _METADATA in entries:
            msgspec.json.decode(entries.pop(_METADATA), type=dict[str, str] | None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"its header cannot be read: {error}") from error
    return {name: _entry(name, raw) for name, raw in entries.items()}


def _entry(name: str, raw: msgspec.Raw) -> TensorHeader:
    try:
        entry = msgspec.json.decode(raw, type=TensorHeader)
        json.loads(bytes(raw), object_pairs_hook=_unique)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"tensor {shown(name)}: {error}") from error
    bits = _BITS.get(entry.dtype)
    if bits is None:
        raise ValueError(f"tensor {shown(name)} is of type {shown(entry.dtype)}, which is unknown")
    begin, end = entry.data_offsets
    expected = math.prod(entry.shape) * bits // 8
    if end - begin != expected:
        raise ValueError(
            f"tensor {shown(name)}: {entry.dtype} {list(entry.shape)} takes {expected} bytes, its "
            f"offsets give it {end - begin}"
        )
    return entry


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("one of its keys stands twice")
    return made


def _check_tiling(tensors: dict[str, TensorHeader], size: int) -> None:
    """Refuse tensors that overlap, leave holes or reach beyond the file."""
    position = 0
    for name in sorted(tensors, key=lambda name: (tensors[name].data_offsets, name)):
        begin, end = tensors[name].data_offsets
        if end > size:
            raise ValueError(
                f"it is truncated: tensor {shown(name)} ends at byte {end} of the data, and {size} "
                "are there"
            )
        if begin != position:
            fault = "overlaps the one before it" if begin < position else "leaves a hole before it"
            raise ValueError(f"tensor {shown(name)} {fault}")
        position = end
    if position != size:
        raise ValueError(f"{size - position} bytes follow the last tensor")
