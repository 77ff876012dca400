"""JSON that a stranger wrote: one object, no duplicate keys, no surprise exceptions.

Also says how a stranger's text is shown in a message.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from cluster.errors import InvalidAdapter

MAX_SHOWN_CHARS = 120
MAX_SHOWN_ITEMS = 4


class _Refused(ValueError):
    """JSON that Python would take and we do not."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"the key {shown(key)} stands twice")
            seen.add(key)
    return made


def _no_constant(text: str) -> float:
    raise _Refused(f"{text} is not JSON")


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object that `data` spells.

    Raises:
        InvalidAdapter: starting with `where`, if it spells anything else.
    """
    try:
        made = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except RecursionError as error:
        raise InvalidAdapter(f"{where}: nested too deeply") from error
    except ValueError as error:  # bad UTF-8, bad JSON, numbers of thousands of digits
        raise InvalidAdapter(f"{where}: not valid JSON: {error}") from error
    if not isinstance(made, dict):
        raise InvalidAdapter(f"{where}: must be a JSON object, not {type(made).__name__}")
    return made


def shown(value: object) -> str:
    """Return a stranger's value as printable text of bounded length."""
    text = ascii(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "...'"


def listed(values: Iterable[object]) -> str:
    """Return the first few values, shown, and how many more there are."""
    items: Sequence[object] = tuple(values)
    text = ", ".join(shown(item) for item in items[:MAX_SHOWN_ITEMS])
    more = len(items) - MAX_SHOWN_ITEMS
    return f"{text} and {more} more" if more > 0 else text
