"""How much work a value is to whatever walks through it, told without walking through all of it."""

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel

_CHARACTERS = 64  # of a text that weigh as much as one value


def weight(value: Any, limit: int) -> int:
    """Return how many values are in a value, long texts counted as several.

    Over the limit, it is some number over it: no more than so many values are looked at.
    """
    total = 0
    rest = [value]
    while rest:
        one = rest.pop()
        total += 1
        inner: Collection[Any] = ()
        if isinstance(one, str):
            total += len(one) // _CHARACTERS
        elif isinstance(one, dict):
            inner = one.values()
        elif isinstance(one, list | tuple):
            inner = one
        elif isinstance(one, BaseModel):
            inner = (*one.__dict__.values(), one.model_extra)
        if total + len(inner) > limit:
            return total + len(inner)
        rest.extend(inner)
    return total
