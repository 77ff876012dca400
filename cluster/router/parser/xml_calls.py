"""Tool calls whose arguments stand between tags of their own: Qwen3-Coder and Qwen3.5.

The arguments become an object of JSON. One whose schema says string, or nothing, is its text as it
stands, without the line breaks beside the tags; it is shown as it comes. Any other is JSON if it
can be read as what its schema says, and a string if not.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from cluster.router.parser.content import Content
from cluster.router.parser.json_calls import HERMES_CLOSE, HERMES_OPEN
from cluster.router.parser.message import Collector
from cluster.router.parser.text_source import SPACES, Steps, Take, TextSource

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^>\n]+")
_PLAIN = re.compile(r"[^<\n]+")
_ENDS = (END_PARAMETER, PARAMETER, END_FUNCTION)  # some models leave out the first
_WORDS = {"True": "true", "False": "false", "None": "null"}  # of Python
_TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "object": dict,
    "array": list,
    "null": type(None),
}

Properties = Mapping[str, Any]  # of the arguments, their schemas


def qwen3_xml(
    source: TextSource, out: Collector, functions: Mapping[str, Mapping[str, Any]]
) -> Steps[None]:
    """Consume the text of an answer with calls between two tags; functions have schemas."""
    content = Content(HERMES_OPEN)
    while (before := (yield from content.until_marker(source, out.content))) is not None:
        source.record(before)
        yield from source.run(SPACES)
        name = yield from _named(source, FUNCTION)
        if name not in functions:
            out.content(source.recorded())
            continue
        source.recorded()
        out.begin_call(name)
        out.arguments("{")
        properties = functions[name].get("properties")
        known = properties if isinstance(properties, dict) else {}
        is_whole = yield from _arguments(source, out, known)
        if is_whole:
            yield from source.run(SPACES)
            found = yield from source.one_of((HERMES_CLOSE,))
            is_whole = found == HERMES_CLOSE or not (yield from source.peek())
        recorded = source.recorded()
        if not is_whole:
            out.content(recorded)
        else:
            yield from source.run(SPACES)


def _named(source: TextSource, tag: str) -> Steps[str]:
    """Consume a tag with a name; return that, "" if it is none."""
    if (yield from source.one_of((tag,))) != tag:
        return ""
    name = yield from source.run(_NAME)
    if (yield from source.peek()) != ">":
        return ""
    source.skip()
    return name


def _arguments(source: TextSource, out: Collector, properties: Properties) -> Steps[bool]:
    """Consume parameters and what ends them; records what is none of them."""
    separator, tag = "", ""
    while True:
        if not tag:
            source.record()
            yield from source.run(SPACES)
            tag = yield from source.one_of((PARAMETER, END_FUNCTION))
        if tag == END_FUNCTION:
            out.arguments("}")
            source.record()
            return True
        name = (yield from source.run(_NAME)) if tag == PARAMETER else ""
        following = yield from source.peek()
        if not (name and following == ">"):
            if following:  # and not that the text has ended
                out.arguments("}")
            return False
        source.skip()
        source.recorded()
        out.arguments(f"{separator}{_quoted(name)}: ")
        separator = ", "
        tag = yield from _value(source, out, properties.get(name))
        if not tag:
            return False  # the text has ended
        source.record(tag)
        tag = "" if tag == END_PARAMETER else tag


def _value(source: TextSource, out: Collector, schema: Any) -> Steps[str]:
    """Consume a value and what ends it; return that."""
    types = _types(schema)
    if types <= {"string"}:
        out.arguments('"')
        tag = yield from _text(source, lambda text: out.arguments(_escaped(text)))
        if tag:
            out.arguments('"')
        return tag
    parts: list[str] = []
    tag = yield from _text(source, parts.append)
    text = "".join(parts)
    if tag:
        out.arguments(_coerced(text, types))
    else:  # cut short, but not lost
        out.arguments(f'"{_escaped(text)}' if "string" in types else text)
    return tag


def _text(source: TextSource, take: Take) -> Steps[str]:
    """Consume text without the line breaks at its ends; return the tag behind it, "" for none."""
    if (yield from source.peek()) == "\n":
        source.skip()
    has_break = False  # that may be the last
    while following := (yield from source.peek()):
        if following == "\n":
            if has_break:
                take("\n")
            has_break = bool(source.skip())
            continue
        found = source.take(_PLAIN)
        if not found:
            found = yield from source.one_of(_ENDS)
            if found in _ENDS:
                return found
        take("\n" + found if has_break else found)
        has_break = False
    return ""


def _types(schema: Any) -> frozenset[str]:
    """Return the types that a schema names; none where it names none."""
    if not isinstance(schema, dict):
        return frozenset()
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(one for one in declared if isinstance(one, str))
    found: frozenset[str] = frozenset()
    for name in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(name)
        for one in choices if isinstance(choices, list) else ():
            found |= _types(one)
    if "$ref" in schema:
        found |= {"object", "array"}
    return found


def _coerced(text: str, types: frozenset[str]) -> str:
    """Return JSON of what the text says as one of the types, of the text itself if it does not."""
    stripped = text.strip()
    literal = _WORDS.get(stripped, stripped)
    try:
        value = json.loads(literal, parse_int=_some_int, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _quoted(text)
    return literal if any(_is_of(value, name) for name in types) else _quoted(text)


def _is_of(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES.get(name, ()))


def _some_int(_: str) -> int:
    """Stand for a number of any length: its own text is shown."""
    return 2


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return _quoted(text)[1:-1]
