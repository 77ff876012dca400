"""What an answer says, taken apart: the shapes in which it grows, and what collects them."""

import msgspec


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """What one tool call grows by."""

    index: int  # among the answer's calls
    name: str | None  # None: it has begun before
    arguments: str  # a piece of JSON


class MessageDelta(msgspec.Struct, frozen=True):
    """What an answer grows by, or all of it."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()  # at most one of each index

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


class Collector:
    """Takes what a parser finds until it is fetched."""

    def __init__(self, *, is_parallel: bool, shows_reasoning: bool) -> None:
        self.num_calls = 0
        self._is_parallel = is_parallel  # else the first call counts and no other is shown
        self._shows_reasoning = shows_reasoning
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._names: dict[int, str] = {}  # of calls that have begun
        self._arguments: dict[int, list[str]] = {}

    def reasoning(self, text: str) -> None:
        """Take a part of the thoughts."""
        if self._shows_reasoning:
            self._reasoning.append(text)

    def content(self, text: str) -> None:
        """Take a part of the content."""
        if text:
            self._content.append(text)

    def begin_call(self, name: str) -> None:
        """Take the beginning of a call."""
        index = self.num_calls
        self.num_calls += 1
        if self._is_parallel or index == 0:
            self._names[index] = name
            self._arguments[index] = []

    def arguments(self, text: str) -> None:
        """Take a part of the arguments of the call that was begun last."""
        index = self.num_calls - 1
        if text and (self._is_parallel or index == 0):
            self._arguments.setdefault(index, []).append(text)

    def fetch(self) -> MessageDelta:
        """Return what was taken since this was asked for last."""
        calls = tuple(
            ToolCallDelta(index, self._names.get(index), "".join(parts))
            for index, parts in self._arguments.items()
        )
        delta = MessageDelta("".join(self._reasoning), "".join(self._content), calls)
        self._reasoning, self._content = [], []
        self._names, self._arguments = {}, {}
        return delta
