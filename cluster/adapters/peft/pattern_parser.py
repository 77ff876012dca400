"""The grammar of the regular expressions that `pattern.py` matches, and nothing of matching.

Python's syntax, less everything that a matcher without backtracking cannot or need not do.
"""

from dataclasses import dataclass

MAX_PATTERN_CHARS = 2048
MAX_REPEAT = 100
MAX_DEPTH = 20

_ASCII = frozenset(map(chr, range(128)))
_DIGITS = frozenset("0123456789")
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
WORD = _DIGITS | _LETTERS | {"_"}
_SPACE = frozenset(" \t\n\r\f\v")  # \x1c to \x1f are space to Python too; no module path has them
_CLASSES = {"d": _DIGITS, "w": WORD, "s": _SPACE}
_SPECIAL = frozenset("*+?{}[]()|\\")
# Unsloth's guard against the experts of a sparse model. No path of a dense model has an "experts",
# so it always holds; other assertions on what follows are refused.
_NO_EXPERTS = r"?!.*\.experts\.\d)"


class PatternError(ValueError):
    """An expression outside the subset; the message says where it leaves it."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """One character out of `chars`."""

    chars: frozenset[str]


@dataclass(frozen=True, slots=True)
class Anchor:
    """`^`, `$` or `b`, the edge of a word."""

    sign: str


@dataclass(frozen=True, slots=True)
class Row:
    """Parts one after another."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Choice:
    """Any one of the options."""

    options: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    """`least` to `most` times the same; None: no end."""

    part: "Node"
    least: int
    most: int | None


Node = Symbol | Anchor | Row | Choice | Repeat


def parse_pattern(text: str) -> Node:
    """Return the syntax tree of an expression.

    Raises:
        PatternError: if it is not in the subset.
    """
    if len(text) > MAX_PATTERN_CHARS:
        raise PatternError(f"it is longer than {MAX_PATTERN_CHARS} characters")
    if not text.isascii():
        raise PatternError("it has characters outside ASCII")
    return _Parser(text).parse()


class _Parser:
    """Recursive descent over the text; `_at` is the next character to read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def parse(self) -> Node:
        node = self._choice(0)
        if self._at < len(self._text):
            raise PatternError("a ')' closes no group")
        return node

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise PatternError("it ends too early")
        self._at += 1
        return char

    def _skip(self, word: str) -> bool:
        """Step over `word` if it comes next."""
        found = self._text.startswith(word, self._at)
        self._at += len(word) if found else 0
        return found

    def _choice(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise PatternError(f"groups are nested more than {MAX_DEPTH} deep")
        options = [self._row(depth)]
        while self._skip("|"):
            options.append(self._row(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _row(self, depth: int) -> Node:
        parts = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom(depth)))
        return Row(tuple(parts))

    def _repeated(self, part: Node) -> Node:
        if self._peek() not in ("*", "+", "?", "{"):
            return part
        if isinstance(part, Anchor):
            raise PatternError("an anchor cannot be repeated")
        sign = self._take()
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(sign) or self._bounds()
        self._skip("?")  # lazy: finds other spans, but matches the same subjects
        if self._peek() in ("*", "+", "?", "{"):
            raise PatternError("possessive and doubled repeats are not supported")
        return Repeat(part, least, most)

    def _bounds(self) -> tuple[int, int | None]:
        """Read `m}`, `m,}`, `,n}` or `m,n}`."""
        least = self._number()
        most = least
        if self._skip(","):
            most = self._number()
        elif least is None:
            raise PatternError("a literal '{' must be written '\\{'")
        if not self._skip("}"):
            raise PatternError("a literal '{' must be written '\\{'")
        least = least or 0
        if most is not None and least > most:
            raise PatternError("a repeat has bounds in the wrong order")
        if max(least, most or 0) > MAX_REPEAT:
            raise PatternError(f"a repeat is over {MAX_REPEAT}")
        return least, most

    def _number(self) -> int | None:
        begin = self._at
        while self._peek() in _DIGITS:
            self._at += 1
        return int(self._text[begin : self._at]) if self._at > begin else None

    def _atom(self, depth: int) -> Node:
        char = self._take()
        match char:
            case "(":
                return self._group(depth)
            case "[":
                return Symbol(self._class())
            case ".":
                return Symbol(_ASCII - {"\n"})
            case "^" | "$":
                return Anchor(char)
            case "\\":
                return Anchor("b") if self._skip("b") else Symbol(self._escape())
        if char in _SPECIAL:
            raise PatternError(f"a {char!r} stands where it has no meaning")
        return Symbol(frozenset(char))

    def _group(self, depth: int) -> Node:
        if self._skip(_NO_EXPERTS):
            return Row(())
        if self._skip("?") and not self._skip(":"):
            raise PatternError("of the '(?' forms only '(?:' is supported")
        node = self._choice(depth + 1)
        if not self._skip(")"):
            raise PatternError("a group is not closed")
        return node

    def _escape(self) -> frozenset[str]:
        char = self._take()
        if char in _CLASSES:
            return _CLASSES[char]
        if char.lower() in _CLASSES:
            return _ASCII - _CLASSES[char.lower()]
        if char in WORD - {"_"}:
            raise PatternError(f"'\\{char}' is not supported")
        return frozenset(char)

    def _class(self) -> frozenset[str]:
        """Read a character class up to its bracket."""
        is_negated = self._skip("^")
        chars: frozenset[str] = frozenset()
        if self._peek() == "]":
            raise PatternError("a literal ']' in a class must be written '\\]'")
        while not self._skip("]"):
            chars |= self._class_item()
        return _ASCII - chars if is_negated else chars

    def _class_item(self) -> frozenset[str]:
        first = self._class_chars()
        if self._peek() != "-" or self._text.startswith("-]", self._at):
            return first
        self._take()
        last = self._class_chars()
        if len(first) != 1 or len(last) != 1 or min(first) > min(last):
            raise PatternError("a class has a bad range")
        return frozenset(map(chr, range(ord(min(first)), ord(min(last)) + 1)))

    def _class_chars(self) -> frozenset[str]:
        char = self._take()
        return self._escape() if char == "\\" else frozenset(char)
