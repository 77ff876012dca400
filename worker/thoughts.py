"""Thoughts at the beginning of answers: where an answer is in its own, and when that must end.

Both are functions of the answer's tokens alone, so that a sequence that is preempted, moved to
other ranks or computed together with others thinks as long. What the tokens say decides, as for
whoever takes the answer apart (`cluster/router/parser/thoughts.py`): tags need not be tokens of
their own. Free of torch: routers count by it.
"""

from collections.abc import Callable

from worker.protocol import ThinkingBudget

_SPACES = b" \t\r\n"
MAX_OVER = 3  # tokens over a budget, where its last one ends within a character


class ThoughtTracker:
    """Where an answer is in its thought; fed with the bytes of one token after the other."""

    def __init__(self, opening: str, closing: str, *, is_open: bool) -> None:
        """Begin an answer; if `is_open` it begins in a thought that the prompt has opened."""
        self.num_tokens = 0  # of the thought, so far; those of the tags beside it do not count
        self.is_open = is_open  # the next token is of the thought, or closes it
        self._opening = opening.encode()
        self._closing = closing.encode()
        self._may_open = True  # what has come may be the beginning of the tag
        self._text = b""  # in which a tag may have begun
        self._starts: list[int] = []  # in it, of the tokens that count and begin there

    @property
    def is_over(self) -> bool:
        """Whether no thought follows: it has ended, or there was none."""
        return not (self.is_open or self._may_open)

    @property
    def is_whole(self) -> bool:
        """Whether the text does not end within a character."""
        for length in range(1, min(4, len(self._text) + 1)):
            byte = self._text[-length]
            if byte >= 0xC0:  # the first byte of a character, which says how many it has
                return length >= (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
            if byte < 0x80:
                return True
        return True

    def feed(self, token: bytes) -> None:
        """Take what the next token says."""
        if self.is_over:
            return
        if self._may_open:
            token = self._until_open(token)
            if not self.is_open or not token:
                return
        else:
            self._starts.append(len(self._text))
            self.num_tokens += 1
        self._think(token)

    def _until_open(self, token: bytes) -> bytes:
        """Look for the tag that opens a thought; return what of the token is thought behind it."""
        if self.is_open:  # it counts unless it turns out to be the tag again
            self._starts.append(len(self._text))
            self.num_tokens += 1
        self._text += token
        begun = self._text.lstrip(_SPACES)
        if begun.startswith(self._opening):
            self._may_open, self.is_open = False, True
            rest = begun[len(self._opening) :]
            self._text, self._starts = b"", [0] if rest else []
            self.num_tokens = len(self._starts)
            return rest
        if self._opening.startswith(begun):
            return b""
        self._may_open = False
        rest, self._text = self._text, b""
        return rest

    def _think(self, token: bytes) -> None:
        """Look for the tag that closes the thought."""
        self._text += token
        place = self._text.find(self._closing)
        if place >= 0:
            self.is_open = False
            self.num_tokens -= sum(start >= place for start in self._starts)
            self._text, self._starts = b"", []
            return
        cut = max(0, len(self._text) - max(MAX_OVER, len(self._closing) - 1))
        self._text = self._text[cut:]
        self._starts = [start - cut for start in self._starts if start >= cut]


class BudgetedThought:
    """The thought of one answer that has a budget."""

    def __init__(self, budget: ThinkingBudget, token_bytes: Callable[[int], bytes]) -> None:
        """Begin an answer; `token_bytes` says what a token says."""
        self.num_fed = 0  # output tokens
        self._budget = budget
        self._token_bytes = token_bytes
        self._tracker = ThoughtTracker(budget.opening, budget.closing, is_open=budget.is_open)
        self._left: list[int] = []  # of the tokens that close the thought, the next one in front
        self._is_over = False  # it is no thought after all
        self._close_if_spent()

    @property
    def forced(self) -> int | None:
        """The token that comes next, unless a grammar forbids it; None: any may."""
        return self._left[0] if self._left else None

    def feed(self, token_id: int) -> None:
        """Go on behind the next output token."""
        self.num_fed += 1
        if self._left and token_id != self._left.pop(0):
            # A grammar forbade it: what looks like a thought belongs to the form of the answer.
            self._left, self._is_over = [], True
        if self._is_over or self._tracker.is_over:
            return
        self._tracker.feed(self._token_bytes(token_id))
        if not self._left:
            self._close_if_spent()

    def _close_if_spent(self) -> None:
        tracker, budget = self._tracker, self._budget
        num_over = tracker.num_tokens - budget.num_tokens
        if tracker.is_open and num_over >= 0 and (tracker.is_whole or num_over >= MAX_OVER):
            self._left = list(budget.closing_tokens)
