"""JSON values as they come, character by character, without recursion.

Strict in the structure, and lenient inside of strings: a line break that should have been escaped
is the model's, as are escapes that JSON does not know.
"""

import json
import re

from cluster.router.parser.text_source import SPACES, Steps, Take, TextSource

_OF_STRING = re.compile(r'[^"\\]+')
_OF_SCALAR = re.compile(r"[A-Za-z0-9+.-]+")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_CLOSING = {"{": "}", "[": "]"}


def ignore(_: str) -> None:
    """Take a part of a value that nobody wants."""


def value(source: TextSource, take: Take) -> Steps[bool]:
    """Consume one value and give it to `take` in parts; False where it is none, or ends early.

    What is consumed of a wrong one was given to `take`, too.
    """
    closing: list[str] = []  # of the objects and lists around
    while True:
        take((yield from source.run(SPACES)))
        first = yield from source.peek()
        if first in _CLOSING:
            take(source.skip())
            closing.append(_CLOSING[first])
            take((yield from source.run(SPACES)))
            if (yield from source.peek()) != closing[-1]:
                if first == "{" and not (yield from _key(source, take)):
                    return False
                continue
        elif first == '"':
            if not (yield from string(source, take)):
                return False
        elif not (yield from _scalar(source, take)):
            return False
        is_open = yield from _close(source, take, closing)
        if is_open is None or not closing:
            return is_open is not None


def string(source: TextSource, take: Take) -> Steps[bool]:
    """Consume a string as `value` does, with its quotes."""
    if (yield from source.peek()) != '"':
        return False
    take(source.skip())
    while following := (yield from source.peek()):
        if following == '"':
            take(source.skip())
            return True
        if following == "\\":
            backslash = source.skip()
            if not (yield from source.peek()):
                take(backslash)
                return False
            take(backslash + source.skip())
        else:
            take(source.take(_OF_STRING))
    return False


def text_of(literal: str) -> str | None:
    """Return what a string of JSON says; None if it is wrong."""
    try:
        text: str = json.loads(literal, strict=False)
    except ValueError:
        return None
    return text


def _key(source: TextSource, take: Take) -> Steps[bool]:
    """Consume the name of a member and the colon behind it."""
    if not (yield from string(source, take)):
        return False
    take((yield from source.run(SPACES)))
    if (yield from source.peek()) != ":":
        return False
    take(source.skip())
    return True


def _scalar(source: TextSource, take: Take) -> Steps[bool]:
    text = yield from source.run(_OF_SCALAR)
    take(text)
    return _SCALAR.fullmatch(text) is not None


def _close(source: TextSource, take: Take, closing: list[str]) -> Steps[bool | None]:
    """Consume what closes behind a value; return whether another one comes, None for neither."""
    while closing:
        take((yield from source.run(SPACES)))
        following = yield from source.peek()
        if following == closing[-1]:
            take(source.skip())
            closing.pop()
            continue
        if following != ",":
            return None
        take(source.skip())
        if closing[-1] == "}":
            take((yield from source.run(SPACES)))
            if not (yield from _key(source, take)):
                return None
        return True
    return False
