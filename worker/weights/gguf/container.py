"""Reads what a GGUF file says of itself, and nothing else of it: metadata, and where tensors lie.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian. Owns
every check of the container, for strangers write it: each length is held against the bytes that
are there before anything is made of it, and tensors must tile the file. What keys and tensors mean
is judged by others. Free of torch.
"""

import math
import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from worker.regular_file import open_regular_file
from worker.weights.gguf.block_types import BlockType, block_type
from worker.weights.safetensors_header import shown

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 2**26  # a vocabulary of 262,144 tokens and its merges take 15 MB
MAX_KEYS = 2**14
MAX_TENSORS = 2**17
LONGEST_KEY = 2**16 - 1
LONGEST_NAME = 64  # of a tensor
MAX_DIMENSIONS = 4
_LARGEST_DIMENSION = 2**40
_ALIGNMENT = 32  # unless the file says otherwise
_LARGEST_ALIGNMENT = 2**20
_ALIGNMENT_KEY = "general.alignment"

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {  # struct's letters of a type of value
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    _BOOL: "B",
    10: "Q",
    11: "q",
    12: "d",
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

Shape = tuple[int, ...]
Scalar = int | float | bool | str
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Array:
    """An array of the metadata, which is only made when it is asked for."""

    kind: int
    count: int
    start: int  # in the header


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies, and how."""

    type: BlockType
    shape: Shape  # the axis along which weights lie side by side is the last
    start: int  # in the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Container:
    """What one file says of itself."""

    path: Path
    values: dict[str, Scalar | Array]
    tensors: dict[str, TensorInfo]
    header: bytes

    def elements(self, key: str, array: Array) -> list[Any]:
        """Return what an array holds: numbers, booleans or texts.

        Raises:
            ValueError: if a text is not one; names the file and the key.
        """
        cursor = _Cursor(self.header, len(self.header))
        cursor.position = array.start
        with _naming(f"{self.path.name}: {shown(key)}"):
            if array.kind == _STRING:
                places = list(cursor.texts(array.count))
                return [_decoded(self.header, start, stop) for start, stop in places]
            return [*cursor.numbers(array.kind, array.count)]


def read_container(path: Path) -> Container:
    """Return what a file says of its metadata and tensors.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a whole and well-formed GGUF file; names it, and the key or tensor.
    """
    with open_regular_file(path) as (file, size), _naming(path.name):
        if size < 24:
            raise ValueError(f"it is truncated: its {size} bytes do not hold a header")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, min(size, MAX_HEADER_BYTES))
            num_tensors, num_keys = _counts(cursor, size)
            values = _values(cursor, num_keys)
            infos = _infos(cursor, num_tensors)
            alignment = _alignment(values)
            start = _aligned(cursor.position, alignment)
            tensors = _placed(infos, start, size, alignment)
            return Container(path, values, tensors, data[: cursor.position])


class _naming:
    """Puts what is looked at in front of complaints."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ValueError):
            raise ValueError(f"{self._what}: {error}") from error


class _Cursor:
    """Goes through a header from its start, and never beyond its end."""

    def __init__(self, data: bytes | mmap.mmap, end: int) -> None:
        self._data = data
        self._end = end
        self.position = 0

    def skip(self, num_bytes: int) -> int:
        """Pass over so many bytes; return where they begin.

        Raises:
            ValueError: if so many are not there.
        """
        start = self.position
        if num_bytes > self._end - start:
            limit = f", or over the limit of {MAX_HEADER_BYTES} bytes"
            raise ValueError(
                f"its header is truncated{limit if self._end == MAX_HEADER_BYTES else ''}: "
                f"{num_bytes} bytes at byte {start}, and {self._end - start} are there"
            )
        self.position = start + num_bytes
        return start

    def u32(self) -> int:
        """Return the next number of 32 bits."""
        (value,) = _U32.unpack_from(self._data, self.skip(4))
        return int(value)

    def u64(self) -> int:
        """Return the next number of 64 bits."""
        (value,) = _U64.unpack_from(self._data, self.skip(8))
        return int(value)

    def text(self, longest: int) -> str:
        """Return the next text of at most so many bytes."""
        length = self.u64()
        if length > longest:
            raise ValueError(f"a text of {length} bytes is over {longest}")
        start = self.skip(length)
        return _decoded(self._data, start, self.position)

    def numbers(self, kind: int, count: int) -> tuple[Any, ...]:
        """Return the next numbers or booleans of a type."""
        letter = _SCALARS[kind]
        start = self.skip(count * struct.calcsize(f"<{letter}"))
        found = struct.unpack_from(f"<{count}{letter}", self._data, start)
        if kind != _BOOL:
            return found
        if not all(one in (0, 1) for one in found):
            raise ValueError("a boolean is neither 0 nor 1")
        return tuple(map(bool, found))

    def array(self) -> Array:
        """Return what the next array is, and pass over it."""
        kind, count = self.u32(), self.u64()
        array = Array(kind, count, self.position)
        if kind == _ARRAY:
            raise ValueError("an array of arrays is not supported")
        if kind in _SCALARS:
            self.skip(count * struct.calcsize(f"<{_SCALARS[kind]}"))
            return array
        if kind != _STRING:
            raise ValueError(f"an array of type {kind}, which is unknown")
        if 8 * count > self._end - self.position:
            raise ValueError(f"an array of {count} texts is longer than the header")
        for _ in self.texts(count):
            pass
        return array

    def texts(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield where each of the next texts begins and ends: there are hundreds of thousands."""
        data, end, read = self._data, self._end, _U64.unpack_from
        start = self.position
        for number in range(count):
            stop = start + 8
            if stop <= end:
                stop += read(data, start)[0]
            if stop > end:
                raise ValueError(f"text {number} of {count} ends behind the header")
            yield start + 8, stop
            start = stop
        self.position = start


def _decoded(data: bytes | mmap.mmap, start: int, stop: int) -> str:
    try:
        return data[start:stop].decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the text at byte {start} is no UTF-8: {error.reason}") from None


def _counts(cursor: _Cursor, size: int) -> tuple[int, int]:
    """Return how many tensors and keys there are said to be."""
    magic = cursor.u32().to_bytes(4, "little")
    if magic != MAGIC:
        raise ValueError(f"it is no GGUF file: it begins with {magic!r}")
    version = cursor.u32()
    if version not in (2, 3):
        is_big = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
        what = "it is big endian" if is_big else f"it is of version {version}"
        raise ValueError(f"{what}, which is not supported: versions 2 and 3 of little endian are")
    num_tensors, num_keys = cursor.u64(), cursor.u64()
    for count, most, what in ((num_tensors, MAX_TENSORS, "tensors"), (num_keys, MAX_KEYS, "keys")):
        if count > most:
            raise ValueError(f"{count} {what} are over the limit of {most}")
    return num_tensors, num_keys


def _values(cursor: _Cursor, count: int) -> dict[str, Scalar | Array]:
    values: dict[str, Scalar | Array] = {}
    for number in range(count):
        key = _named(f"key {number}", lambda: cursor.text(LONGEST_KEY))
        if key in values:
            raise ValueError(f"{shown(key)} stands twice")
        values[key] = _named(shown(key), lambda: _value(cursor))
    return values


def _value(cursor: _Cursor) -> Scalar | Array:
    kind = cursor.u32()
    if kind == _STRING:
        return cursor.text(MAX_HEADER_BYTES)
    if kind == _ARRAY:
        return cursor.array()
    if kind not in _SCALARS:
        raise ValueError(f"it is of type {kind}, which is unknown")
    value: int | float | bool = cursor.numbers(kind, 1)[0]
    return value


def _named(what: str, read: Callable[[], T]) -> T:
    with _naming(what):
        return read()


def _infos(cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
    """Return where tensors lie behind the start of the data, as they are said to."""
    infos: dict[str, TensorInfo] = {}
    for number in range(count):
        name = _named(f"tensor {number}", lambda: cursor.text(LONGEST_NAME))
        if name in infos:
            raise ValueError(f"tensor {shown(name)} stands twice")
        infos[name] = _named(f"tensor {shown(name)}", lambda: _info(cursor))
    return infos


def _info(cursor: _Cursor) -> TensorInfo:
    num_dimensions = cursor.u32()
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"{num_dimensions} dimensions are not 1 to {MAX_DIMENSIONS}")
    shape = tuple(cursor.u64() for _ in range(num_dimensions))[::-1]
    if not all(1 <= one <= _LARGEST_DIMENSION for one in shape):
        raise ValueError(f"its shape {list(shape)} is not one")
    kind, offset = block_type(cursor.u32()), cursor.u64()
    if shape[-1] % kind.num_weights:
        raise ValueError(f"{kind.name} has blocks of {kind.num_weights}, and its rows {shape[-1]}")
    return TensorInfo(kind, shape, offset, math.prod(shape[:-1]) * kind.row_bytes(shape[-1]))


def _alignment(values: dict[str, Scalar | Array]) -> int:
    alignment = values.get(_ALIGNMENT_KEY, _ALIGNMENT)
    is_one = type(alignment) is int and alignment in (1 << n for n in range(3, 21))
    if not is_one:
        raise ValueError(f"{_ALIGNMENT_KEY} is not a power of two from 8 to {_LARGEST_ALIGNMENT}")
    assert isinstance(alignment, int), "just looked at"
    return alignment


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _placed(
    infos: dict[str, TensorInfo], start: int, size: int, alignment: int
) -> dict[str, TensorInfo]:
    """Return where tensors lie in the file; they follow one another but for what aligns them."""
    position = start
    placed: dict[str, TensorInfo] = {}
    for name in sorted(infos, key=lambda name: (infos[name].start, name)):
        info = infos[name]
        begin = start + info.start
        end = begin + info.num_bytes
        if info.start % alignment:
            raise ValueError(f"tensor {shown(name)} is not aligned to {alignment} bytes")
        if begin != position:
            fault = "overlaps the one before it" if begin < position else "leaves a hole before it"
            raise ValueError(f"tensor {shown(name)} {fault}")
        if end > size:
            raise ValueError(
                f"it is truncated: tensor {shown(name)} ends at byte {end}, and {size} are there"
            )
        placed[name] = TensorInfo(info.type, info.shape, begin, info.num_bytes)
        position = _aligned(end, alignment)
    return placed
