"""JSON schemas, as llguidance must get them to be followed to the letter.

llguidance refuses what it does not know. What it takes and follows in another way is put so here
that it is followed, or refused: an answer that ends is valid. Formats are followed, too, as far as
they are known; `contentEncoding` and `contentMediaType` say nothing, as in the newer drafts.
"""

import math
from collections.abc import Mapping
from typing import Any

from cluster.router.parser.patterns import pattern_of

# `u` is missing: a key that is not to come again could be spelled with it in another way.
ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
MAX_PARTS = 10_000  # objects and lists in a schema
MAX_PATTERN_PROPERTIES = 64  # of one object: each is compared with each
_DIALECTS = frozenset(
    f"{scheme}://json-schema.org/{draft}"
    for scheme in ("http", "https")
    for draft in (
        "draft-04/schema",
        "draft-06/schema",
        "draft-07/schema",
        "draft/2019-09/schema",
        "draft/2020-12/schema",
    )
)
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_DATA = frozenset({"const", "enum", "default", "examples", "required"})
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_LEAST = -(2**63) + 1024  # that llguidance can count to, as a float
_MOST = 2**63 - 1024

_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:{_LEAP}00|[0-9][0-9]{_LEAP})"  # that has a 29th of February
_ANY_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DATE = rf"(?:{_ANY_YEAR}-(?:0[13-9]|1[0-2]|02-[01]|02-2[0-8])|{_LEAP_YEAR}-02-29)"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5]"  # no leap second: there was none at most times
_FORMATS = {"date": f"^{_DATE}", "time": f"^{_TIME}", "date-time": f"^{_DATE}[-0-9]*[tT]{_TIME}"}


def followed(schema: Any) -> Any:
    """Return a schema that llguidance follows as this one is meant.

    Raises:
        ValueError: if there is none, with the reason.
    """
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise ValueError("x-guidance: how a schema is followed is not for the schema to say")
    try:
        if _num_parts(schema) > MAX_PARTS:
            raise ValueError(f"a schema may have {MAX_PARTS} objects and lists")
        return {} if schema is True else _followed(schema)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def _num_parts(part: Any) -> int:
    if isinstance(part, dict):
        return 1 + sum(map(_num_parts, part.values()))
    return 1 + sum(map(_num_parts, part)) if isinstance(part, list) else 0


def _followed(part: Any) -> Any:
    if isinstance(part, list):
        return [_followed(one) for one in part]
    if not isinstance(part, dict):
        return part
    made: dict[str, Any] = {}
    for key, value in part.items():
        if key in _DATA:
            made[key] = value
        elif key in _BY_NAME and isinstance(value, dict):
            of_patterns = key == "patternProperties"
            made[key] = {
                _pattern(name, key) if of_patterns else name: _followed(one)
                for name, one in value.items()
            }
        else:
            made[key] = _followed(value)
    _check(made)
    _put(made)
    return made


def _check(schema: Mapping[str, Any]) -> None:
    dialect = schema.get("$schema")
    if isinstance(dialect, str) and dialect.rstrip("#") not in _DIALECTS:
        raise ValueError(f"$schema: {dialect[:100]!r} is none of the drafts 4 to 2020-12")
    for key in ("const", "enum"):
        if key in schema:
            _check_value(key, schema[key])
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict) and len(patterns) > MAX_PATTERN_PROPERTIES:
        raise ValueError(f"patternProperties: {len(patterns)}, over {MAX_PATTERN_PROPERTIES}")
    least, required = schema.get("minProperties"), schema.get("required")
    is_closed = schema.get("additionalProperties") is False and not patterns
    if isinstance(least, int) and not is_closed:
        num_required = len(set(map(str, required))) if isinstance(required, list) else 0
        if least - num_required > 1:
            raise ValueError(
                "minProperties: that names of properties differ is not followed, but for those "
                "that are required"
            )


def _check_value(key: str, value: Any) -> None:
    """Refuse a value that cannot be said, or only nearly."""
    if isinstance(value, dict):
        for one in (*value, *value.values()):
            _check_value(key, one)
    elif isinstance(value, list):
        for one in value:
            _check_value(key, one)
    elif isinstance(value, str):
        odd = next((c for c in value if (c < " " and c not in "\b\t\n\f\r") or c == "\x7f"), "")
        if odd:
            raise ValueError(f"{key}: the character {odd!r} cannot be said")
    elif isinstance(value, int) and not isinstance(value, bool):
        if int(_float(key, value)) != value or not _LEAST <= value <= _MOST:
            raise ValueError(f"{key}: {str(value)[:40]} is a number that cannot be followed")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key}: {value} is no number")


def _put(schema: dict[str, Any]) -> None:
    """Change what is followed in another way than it is meant, into something narrower."""
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = _pattern(schema["pattern"], "pattern")
    form = schema.get("format")
    if isinstance(form, str) and form in _FORMATS:
        if "pattern" not in schema:
            schema["pattern"] = _FORMATS[form]
        else:
            others = schema.get("allOf", [])
            if isinstance(others, list):
                schema["allOf"] = [*others, {"pattern": _FORMATS[form]}]
    for key in (*_LOWER, *_UPPER):
        limit = schema.get(key)
        if isinstance(limit, int) and not isinstance(limit, bool):
            schema[key] = _bound(key, limit, is_lower=key in _LOWER)


def _bound(key: str, limit: int, *, is_lower: bool) -> int:
    """Return the limit, or the next number behind it that is a float."""
    if not is_lower:
        return -_bound(key, -limit, is_lower=True)
    near = _float(key, limit)
    if near < limit:
        near = math.nextafter(near, math.inf)
    return limit if int(near) == limit > _LEAST else max(int(near), _LEAST)


def _float(key: str, number: int) -> float:
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{key}: {str(number)[:40]}... is too large a number") from None


def _pattern(pattern: str, key: str) -> str:
    try:
        return pattern_of(pattern)
    except ValueError as error:
        raise ValueError(f"{key}: {pattern[:60]!r}: {error}") from None
