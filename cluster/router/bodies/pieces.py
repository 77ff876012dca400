"""A body on its way from the process that has read it: in pieces that are each made at once.

A router makes one piece after the other, and everything else has its turn between two of them. The
pieces are pickles, as a process takes them from its own child and from nobody else.
"""

import asyncio
import pickle
import struct
from collections.abc import Iterator
from itertools import count
from typing import Any

from pydantic import BaseModel

from cluster.router.bodies.weight import weight

PIECE = 1500  # weight of one, which takes some tenths of a millisecond to make
_HEAD = struct.Struct("<cI")
# What follows is within a list, an object or a model, up to its end. More: what it holds, likewise.
_LIST, _OBJECT, _MODEL, _END, _MORE, _KEY, _WHOLE = (bytes([code]) for code in b"lom.+k=")


def packed(value: Any) -> bytes:
    """Return a value in pieces: JSON and models of it."""
    return b"".join(_HEAD.pack(code, len(data)) + data for code, data in _parts(value))


def _parts(value: Any) -> Iterator[tuple[bytes, bytes]]:
    if weight(value, PIECE) <= PIECE or not isinstance(value, list | dict | BaseModel):
        yield _WHOLE, pickle.dumps(value)
        return
    if isinstance(value, list):
        yield _LIST, b""
        yield from _some(enumerate(value), is_list=True)
    elif isinstance(value, dict):
        yield _OBJECT, b""
        yield from _some(iter(value.items()), is_list=False)
    else:
        yield _MODEL, pickle.dumps(type(value))
        yield from _some(iter(value.__getstate__().items()), is_list=False)
    yield _END, b""


def _some(entries: Iterator[tuple[Any, Any]], *, is_list: bool) -> Iterator[tuple[bytes, bytes]]:
    """Yield what a list or an object holds, small values together."""
    batch: dict[Any, Any] = {}
    held = 0

    def flush() -> tuple[bytes, bytes]:
        return _MORE, pickle.dumps(list(batch.values()) if is_list else batch)

    for key, value in entries:
        size = weight(value, PIECE)
        if size > PIECE or held + size > PIECE:
            yield flush()
            batch, held = {}, 0
        if size > PIECE:
            yield _KEY, pickle.dumps(key)
            yield from _parts(value)
        else:
            batch[key] = value
            held += size
    yield flush()


class _Holder:
    """A list, an object or a model that is being made."""

    def __init__(self, kind: type[BaseModel] | None, made: list[Any] | dict[Any, Any]) -> None:
        self._kind = kind
        self._made = made
        self.key: Any = None  # of the large value that comes next

    def more(self, values: Any) -> None:
        """Take in small values."""
        if isinstance(self._made, list):
            self._made.extend(values)
        else:
            self._made.update(values)

    def put(self, value: Any) -> None:
        """Take in a large value."""
        if isinstance(self._made, list):
            self._made.append(value)
        else:
            self._made[self.key] = value

    def end(self) -> Any:
        """Return what has been made."""
        if self._kind is None:
            return self._made
        model = self._kind.__new__(self._kind)
        model.__setstate__(dict(self._made))
        return model


async def unpacked(data: memoryview) -> Any:
    """Return the value that pieces make; others have their turn after each."""
    holders = [_Holder(None, [])]
    offset = 0
    for number in count():
        code, length = _HEAD.unpack_from(data, offset)
        offset += _HEAD.size
        content = data[offset : offset + length]
        offset += length
        if code == _LIST:
            holders.append(_Holder(None, []))
        elif code == _OBJECT:
            holders.append(_Holder(None, {}))
        elif code == _MODEL:
            holders.append(_Holder(pickle.loads(content), {}))
        elif code == _KEY:
            holders[-1].key = pickle.loads(content)
        elif code == _MORE:
            holders[-1].more(pickle.loads(content))
        else:
            value = holders.pop().end() if code == _END else pickle.loads(content)
            holders[-1].put(value)
            if len(holders) == 1:
                return value
        if number:
            await asyncio.sleep(0)
    raise AssertionError("pieces end with a value")
