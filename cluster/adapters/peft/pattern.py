"""Regular expressions that a stranger wrote, matched in time linear in the subject.

A backtracking matcher would let `(a+)+b` in an adapter's config hold the pool for hours. This one
runs all alternatives side by side (Thompson's automaton, made deterministic as it is used). The
subset is literals, `.`, classes, groups, `|`, `* + ? {m,n}`, `^`, `$` and `\b`; anything else is
refused. Subjects are ASCII module paths.
"""

from cluster.adapters.peft.pattern_parser import (
    WORD,
    Anchor,
    Choice,
    Node,
    PatternError,
    Repeat,
    Row,
    Symbol,
    parse_pattern,
)

MAX_STATES = 1000


class Pattern:
    """A compiled expression; `fullmatch` gives what `re.fullmatch` would give, as a bool.

    States are bits of an int. State i either consumes a symbol or stands for a fork or an anchor.
    """

    def __init__(self, text: str) -> None:
        """Compile the expression.

        Raises:
            PatternError: if it is outside the subset or too large.
        """
        self._kinds: list[Symbol | Anchor | None] = []  # None: a fork
        self._targets: list[list[int]] = []
        self._end = self._add(None, [])
        start = self._build(parse_pattern(text), self._end)
        self._start = 1 << start
        self._moves: dict[tuple[int, str, str], int] = {}
        self._accepts: dict[tuple[int, str], bool] = {}

    def fullmatch(self, subject: str) -> bool:
        """Return whether the whole (non-empty) subject matches."""
        states = self._start
        for before, char in zip(("", *subject), subject, strict=False):
            anchors = ("" if before else "^") + ("b" if _is_edge(before, char) else "")
            step = (states, char, anchors)
            found = self._moves.get(step)
            if found is None:
                found = self._moves[step] = self._move(self._closure(states, anchors), char)
            states = found
        anchors = "$" + ("b" if _is_edge(subject[-1:], "") else "")
        accepted = self._accepts.get((states, anchors))
        if accepted is None:
            final = self._closure(states, anchors)
            accepted = self._accepts[states, anchors] = bool(final >> self._end & 1)
        return accepted

    def _add(self, kind: Symbol | Anchor | None, targets: list[int]) -> int:
        if len(self._kinds) >= MAX_STATES:
            raise PatternError(f"it needs more than {MAX_STATES} states")
        self._kinds.append(kind)
        self._targets.append(targets)
        return len(self._kinds) - 1

    def _build(self, node: Node, after: int) -> int:
        """Add the states of `node`, which lead on to state `after`; return where it begins."""
        match node:
            case Symbol() | Anchor():
                return self._add(node, [after])
            case Row(parts):
                for part in reversed(parts):
                    after = self._build(part, after)
                return after
            case Choice(options):
                return self._add(None, [self._build(option, after) for option in options])
            case Repeat(part, least, most):
                return self._build_repeat(part, least, most, after)

    def _build_repeat(self, part: Node, least: int, most: int | None, after: int) -> int:
        if most is None:
            loop = self._add(None, [after])
            self._targets[loop].append(self._build(part, loop))
            after = loop
        else:
            end = after
            for _ in range(most - least):
                after = self._add(None, [end, self._build(part, after)])
        for _ in range(least):
            begin = self._build(part, after)
            if begin == after:
                break  # nothing, which MAX_STATES would not stop from being nested 100 by 100
            after = begin
        return after

    def _move(self, states: int, char: str) -> int:
        """Return the states that `char` leads to at once."""
        reached = 0
        for state in _bits(states):
            kind = self._kinds[state]
            if isinstance(kind, Symbol) and char in kind.chars:
                reached |= 1 << self._targets[state][0]
        return reached

    def _closure(self, states: int, anchors: str) -> int:
        """Return the states reachable without a symbol, through the `anchors` that hold here."""
        pending = list(_bits(states))
        while pending:
            state = pending.pop()
            kind = self._kinds[state]
            if isinstance(kind, Symbol) or (isinstance(kind, Anchor) and kind.sign not in anchors):
                continue
            for target in self._targets[state]:
                if not states >> target & 1:
                    states |= 1 << target
                    pending.append(target)
        return states


def _is_edge(before: str, after: str) -> bool:
    """Return whether a word begins or ends between two characters, "" for none."""
    return (before in WORD) != (after in WORD)


def _bits(states: int) -> list[int]:
    """Return the numbers of the bits that are set, smallest first."""
    found = []
    while states:
        lowest = states & -states
        found.append(lowest.bit_length() - 1)
        states ^= lowest
    return found
