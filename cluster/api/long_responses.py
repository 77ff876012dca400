"""Whole responses of thousands of tokens with their alternatives, spelled away from the streams.

To spell JSON holds the interpreter, so that a thread alone would not help: long lists are spelled
some entries at a time.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from cluster.api.schemas.responses import ChatCompletion, Completion

AT_ONCE = 256  # entries of a list; one may have the texts of twenty alternatives
_encode = msgspec.json.Encoder().encode


def encoded(message: ChatCompletion | Completion) -> bytes:
    """Return a message as JSON; its long lists are spelled, and of no use to anybody else then."""
    for part in _parts(message):
        for name in part.__struct_fields__:
            values = getattr(part, name)
            if isinstance(values, list | tuple) and len(values) > AT_ONCE:
                setattr(part, name, msgspec.Raw(_spelled(values)))
    return _encode(message)


def _parts(message: ChatCompletion | Completion) -> Iterator[Any]:
    """Yield what may have a long list, what is within it first."""
    for choice in message.choices:
        if choice.logprobs is not None:
            yield choice.logprobs
        yield choice
    yield message


def _spelled(values: list[Any] | tuple[Any, ...]) -> bytes:
    starts = range(0, len(values), AT_ONCE)
    return b"[" + b",".join(_encode(values[at : at + AT_ONCE])[1:-1] for at in starts) + b"]"
