"""Text that grows, as a coroutine reads it: it waits where the text ends, until there is more.

All consumed text can be recorded, to be given back as it was when it turns out not to be a call.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # waits for text at each of its steps, and returns a T
Take = Callable[[str], None]

SPACES = re.compile(r"[ \t\r\n]+")


class TextSource:
    """The part of a text that nobody has consumed, and whether there will be more."""

    def __init__(self) -> None:
        self.has_ended = False
        self._text = ""
        self._pos = 0
        self._record: list[str] = []
        self._records = False

    def add(self, text: str) -> None:
        """Append text."""
        self._text = self._text[self._pos :] + text
        self._pos = 0

    def record(self, before: str = "") -> None:
        """Begin anew to record what is consumed, behind what came before."""
        self._record, self._records = [before], True

    def recorded(self) -> str:
        """Return what was consumed since `record`, and record no more."""
        record, self._record, self._records = self._record, [], False
        return "".join(record)

    def peek(self) -> Steps[str]:
        """Return the next character; "" at the end of the text."""
        while self._pos == len(self._text):
            if self.has_ended:
                return ""
            yield
        return self._text[self._pos]

    def take(self, pattern: re.Pattern[str]) -> str:
        """Consume what matches of the text that is here, maybe nothing."""
        match = pattern.match(self._text, self._pos)
        return "" if match is None else self._consume(match.end())

    def skip(self) -> str:
        """Consume the character that was peeked at."""
        return self._consume(self._pos + 1)

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Consume characters as long as they match, however the text is cut."""
        found: list[str] = []
        while (yield from self.peek()):
            part = self.take(pattern)
            if not part:
                break
            found.append(part)
        return "".join(found)

    def rest(self, take: Take) -> Steps[None]:
        """Give all the rest to `take`."""
        while (yield from self.peek()):
            take(self._consume(len(self._text)))

    def one_of(self, literals: tuple[str, ...]) -> Steps[str]:
        """Consume as much as begins any literal; the first character of each is in it only once.

        So that what is consumed in vain holds no beginning of another one.
        """
        found = ""
        while found not in literals:
            following = yield from self.peek()
            if not following or not any(one.startswith(found + following) for one in literals):
                break
            found += self.skip()
        return found

    def unread(self, text: str) -> None:
        """Put text back in front."""
        self._text, self._pos = text + self._text[self._pos :], 0

    def _consume(self, end: int) -> str:
        text = self._text[self._pos : end]
        self._pos = end
        if self._records and text:
            self._record.append(text)
        return text
