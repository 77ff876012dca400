"""Tool calls that are objects of JSON with a name and arguments: Hermes, Llama 3, Mistral.

A call has begun when its function, one of those that are offered, and the first brace of its
arguments are there. From then on its arguments come as the model writes them; where those are no
JSON, they go on to the end of the call, and that they cannot be read is the client's to see, as
with OpenAI. All that has not begun so stays content.
"""

import re
from collections.abc import Collection
from enum import Enum

from cluster.router.parser import json_values
from cluster.router.parser.content import Content
from cluster.router.parser.message import Collector
from cluster.router.parser.text_source import SPACES, Steps, TextSource

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ARGUMENTS = ("arguments", "parameters")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")


class _Outcome(Enum):
    WHOLE = "whole"
    NONE = "none"  # what is recorded is no part of a call
    BROKEN = "broken"  # its arguments are no JSON


def hermes(source: TextSource, out: Collector, names: Collection[str]) -> Steps[None]:
    """Consume the text of an answer with calls between two tags."""
    content = Content(HERMES_OPEN)
    while (before := (yield from content.until_marker(source, out.content))) is not None:
        source.record(before)
        outcome = yield from _object(source, out, names)
        if outcome is _Outcome.WHOLE:
            outcome = yield from _closed(source, HERMES_CLOSE)
        if outcome is _Outcome.BROKEN:
            yield from _arguments_until(Content(HERMES_CLOSE), source, out)
        yield from _after_call(source, out, outcome)


def llama3_json(source: TextSource, out: Collector, names: Collection[str]) -> Steps[None]:
    """Consume the text of an answer that is calls from its beginning, or behind a tag."""
    content = Content(PYTHON_TAG)
    source.record()
    yield from source.run(SPACES)
    before: str | None = source.recorded()
    if (yield from source.peek()) != "{":
        source.unread(before or "")
        before = yield from content.until_marker(source, out.content)
    while before is not None:
        source.record(before)
        outcome = yield from _object(source, out, names)
        if outcome is _Outcome.BROKEN:
            yield from _arguments_until(None, source, out)
        yield from _after_call(source, out, outcome)
        if outcome is _Outcome.WHOLE and (yield from source.peek()) == ";":
            before = source.skip()
        else:
            before = yield from content.until_marker(source, out.content)


def mistral(source: TextSource, out: Collector, names: Collection[str]) -> Steps[None]:
    """Consume the text of an answer whose calls are a list behind a tag, or each behind its own."""
    content = Content(TOOL_CALLS)
    before = yield from content.until_marker(source, out.content)
    while before is not None:
        source.record(before)
        yield from source.run(SPACES)
        if (yield from source.peek()) == "[":
            outcome = yield from _list(source, out, names)
        else:
            outcome = yield from _named(source, out, names)
        is_next = False
        if outcome is _Outcome.BROKEN:
            is_next = yield from _arguments_until(content, source, out)
        yield from _after_call(source, out, outcome)
        before = TOOL_CALLS if is_next else (yield from content.until_marker(source, out.content))


def _object(source: TextSource, out: Collector, names: Collection[str]) -> Steps[_Outcome]:
    """Consume an object that is a call; begins to record anew behind its arguments."""
    name: str | None = None
    early: list[str] | None = None  # arguments before the name
    has_begun = False
    yield from source.run(SPACES)
    separator = "{"
    while True:
        following = yield from source.peek()
        if following == "}" and separator == ",":
            source.skip()
            if name is not None and not has_begun:
                _begin(source, out, name, ["{}"])
            if name is not None:
                source.record()
            return _Outcome.NONE if name is None else _Outcome.WHOLE
        if following != separator:
            return _Outcome.NONE
        source.skip()
        separator = ","
        key = yield from _key(source)
        if key == "name" and name is None:
            name = yield from _string(source)
            if name is None or name not in names:
                return _Outcome.NONE
            if early is not None:
                _begin(source, out, name, early)
                has_begun = True
        elif key in ARGUMENTS and early is None and not has_begun:
            if (yield from source.peek()) != "{":
                return _Outcome.NONE
            if name is None:
                early = []
                if not (yield from json_values.value(source, early.append)):
                    return _Outcome.NONE
            else:
                has_begun = True
                if not (yield from _arguments(source, out, name)):
                    return _Outcome.BROKEN
        elif key is None or not (yield from json_values.value(source, json_values.ignore)):
            return _Outcome.NONE
        yield from source.run(SPACES)


def _begin(source: TextSource, out: Collector, name: str, arguments: list[str]) -> None:
    out.begin_call(name)
    out.arguments("".join(arguments))
    source.record()


def _arguments(source: TextSource, out: Collector, name: str) -> Steps[bool]:
    """Begin a call, and consume its arguments; False if they are no JSON."""
    out.begin_call(name)
    source.recorded()  # shown from here on: there is nothing to give back
    is_whole = yield from json_values.value(source, out.arguments)
    source.record()
    return is_whole


def _key(source: TextSource) -> Steps[str | None]:
    """Consume the name of a member, its colon and the white space around."""
    yield from source.run(SPACES)
    key = yield from _string(source)
    yield from source.run(SPACES)
    if key is None or (yield from source.peek()) != ":":
        return None
    source.skip()
    yield from source.run(SPACES)
    return key


def _string(source: TextSource) -> Steps[str | None]:
    literal: list[str] = []
    is_whole = yield from json_values.string(source, literal.append)
    return json_values.text_of("".join(literal)) if is_whole else None


def _closed(source: TextSource, tag: str) -> Steps[_Outcome]:
    """Consume what closes a whole call; the end of the text does, too."""
    yield from source.run(SPACES)
    found = yield from source.one_of((tag,))
    is_closed = found == tag or not (yield from source.peek())
    return _Outcome.WHOLE if is_closed else _Outcome.NONE


def _list(source: TextSource, out: Collector, names: Collection[str]) -> Steps[_Outcome]:
    source.skip()
    while True:
        outcome = yield from _object(source, out, names)
        if outcome is not _Outcome.WHOLE:
            return outcome
        yield from source.run(SPACES)
        following = yield from source.peek()
        if following not in (",", "]"):
            return _Outcome.NONE if following else _Outcome.WHOLE
        source.skip()
        if following == "]":
            return _Outcome.WHOLE


def _named(source: TextSource, out: Collector, names: Collection[str]) -> Steps[_Outcome]:
    """Consume a name and its arguments, as newer models of Mistral write them."""
    name = yield from source.run(_NAME)
    if name not in names:
        return _Outcome.NONE
    while (yield from source.peek()) == "[":
        if (yield from source.one_of((ARGS, CALL_ID))) == CALL_ID:
            yield from source.run(_NAME)
    yield from source.run(SPACES)
    if (yield from source.peek()) != "{":
        return _Outcome.NONE
    is_whole = yield from _arguments(source, out, name)
    return _Outcome.WHOLE if is_whole else _Outcome.BROKEN


def _arguments_until(content: Content | None, source: TextSource, out: Collector) -> Steps[bool]:
    """Take all for arguments up to a marker, or to the end; return whether it was there."""
    if content is None:
        yield from source.rest(out.arguments)
        return False
    is_closed = yield from content.until_marker(source, out.arguments)
    return is_closed is not None


def _after_call(source: TextSource, out: Collector, outcome: _Outcome) -> Steps[None]:
    """Give back what was no call; consume the white space behind what was one."""
    recorded = source.recorded()
    if outcome is _Outcome.NONE and not (source.has_ended and not recorded):
        out.content(recorded)
    else:
        yield from source.run(SPACES)
