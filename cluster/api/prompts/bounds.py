"""How much a client may put into what a chat template gets as it is.

A template, and what prepares its input, walks through all of it while streams wait.
"""

from collections.abc import Collection
from typing import Any

from cluster.errors import InvalidRequest

MAX_VALUES = 16_384  # of objects and lists, one in another, in one call
MAX_DEPTH = 32


def values_in(value: Any, param: str, limit: int = MAX_VALUES) -> int:
    """Return how many values are in a JSON value.

    Raises:
        InvalidRequest: naming `param`, if they are over the limit, or too deep in one another.
    """
    total = 0
    level = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for one in level:
            inner: Collection[Any] = ()
            if isinstance(one, dict):
                inner = one.values()
            elif isinstance(one, list):
                inner = one
            total += len(inner)
            if total > limit:
                raise InvalidRequest(f"{param}: more than {MAX_VALUES} values", param)
            deeper.extend(inner)
        if not deeper:
            return total
        level = deeper
    raise InvalidRequest(f"{param}: more than {MAX_DEPTH} values in one another", param)
