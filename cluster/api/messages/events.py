"""A message as it grows: the events of its stream, and the whole of it at its end.

The one place where deltas become content blocks. A block begins with the first delta that has
something for it, so an answer that says nothing has none.
"""

from typing import Any

import msgspec

from cluster.api.messages.objects import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    Message,
    MessageChange,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    message_error,
)
from cluster.api.prompts.tool_turns import object_of
from cluster.api.tools.chat_messages import call_id
from cluster.errors import TopworkError
from cluster.router.output_processor import CompletionOutput, OutputProcessor
from cluster.router.parser.families import MessageFormat, MessageParser
from cluster.router.parser.message import MessageDelta as Grown

_encode = msgspec.json.Encoder().encode


class MessageEvents:
    """Spells one answer; each method returns the events that what it is told makes."""

    def __init__(
        self,
        message_id: str,
        model: str,
        processor: OutputProcessor,
        message_format: MessageFormat | None = None,
    ) -> None:
        self.has_begun = False
        self._id = message_id
        self._model = model
        self._processor = processor  # that makes the deltas: for the usage
        self._format = message_format
        self._parser = None if message_format is None else MessageParser(message_format)
        self._open: Block | None = None
        self._pieces: list[str] = []  # of the block that is open
        self._open_call = -1  # which call it is, if it is one
        self._content: list[Block] = []  # the blocks that are whole
        self._stop: MessageChange | None = None

    def grow(self, delta: CompletionOutput) -> bytes:
        """Return the events of what the answer grew by."""
        events = b"" if self.has_begun else self._begin()
        ends = delta.finish_reason is not None
        if self._parser is None:
            events += self._say(delta.text)
        else:
            # One by one: which block comes first does not depend on how the text arrives.
            pieces = delta.text if self._format and self._format.functions else [delta.text]
            for piece in pieces:
                events += self._take(self._parser.feed(piece))
            if ends:
                events += self._take(self._parser.feed("", ends=True))
        if ends:
            events += self._end(delta)
        return events

    def fail(self, error: TopworkError, request_id: str) -> bytes:
        """Return the event by which a stream breaks off."""
        return _sse("error", message_error(error, request_id))

    def message(self) -> Message:
        """Return the whole answer, which has ended."""
        assert self._stop is not None, "a message that goes on"
        stop = self._stop
        return self._message(self._content, stop.stop_reason, stop.stop_sequence)

    def _begin(self) -> bytes:
        self.has_begun = True
        start = self._message([], None, None)
        start.usage.output_tokens = 0  # so far none have been shown
        return _sse("message_start", MessageStart(start)) + _sse("ping", Ping())

    def _take(self, grown: Grown) -> bytes:
        """Return the events of what a parser has found: first what goes on, then what begins."""
        events = b""
        if grown.reasoning:
            events += self._grow_block(ThinkingBlock(""), grown.reasoning)
        for call in grown.tool_calls:
            if call.index == self._open_call:
                events += self._piece(call.arguments)
        events += self._say(grown.content)
        for call in grown.tool_calls:
            if call.name is not None:
                events += self._call(call.index, call.name, call.arguments)
        return events

    def _say(self, text: str) -> bytes:
        return self._grow_block(TextBlock(""), text) if text else b""

    def _call(self, index: int, name: str, arguments: str) -> bytes:
        assert self._format is not None, "only what is parsed has calls"
        block = ToolUseBlock(call_id(self._id, 0, index, self._format.tool_calls), name, {})
        events = self._open_block(block)
        self._open_call = index
        return events + self._piece(arguments)

    def _grow_block(self, empty: TextBlock | ThinkingBlock, text: str) -> bytes:
        """Return the events of a text, in the block that is open if it is of this kind."""
        events = b"" if type(self._open) is type(empty) else self._open_block(empty)
        return events + self._piece(text)

    def _open_block(self, block: Block) -> bytes:
        events = self._close_block()
        self._open = block
        return events + _sse("content_block_start", BlockStart(len(self._content), block))

    def _piece(self, text: str) -> bytes:
        """Return the event by which the open block grows, if it does."""
        if not text:
            return b""
        self._pieces.append(text)
        delta: TextDelta | ThinkingDelta | InputDelta
        match self._open:
            case TextBlock():
                delta = TextDelta(text)
            case ThinkingBlock():
                delta = ThinkingDelta(text)
            case _:
                delta = InputDelta(text)
        return _sse("content_block_delta", BlockDelta(len(self._content), delta))

    def _close_block(self) -> bytes:
        """End the block that is open, if one is."""
        if self._open is None:
            return b""
        text = "".join(self._pieces)
        match self._open:
            case TextBlock():
                block: Block = TextBlock(text)
            case ThinkingBlock():
                block = ThinkingBlock(text)
            case ToolUseBlock(id=of_call, name=name):
                block = ToolUseBlock(of_call, name, input_of(text))
        self._content.append(block)
        self._open, self._pieces, self._open_call = None, [], -1
        return _sse("content_block_stop", BlockStop(len(self._content) - 1))

    def _end(self, delta: CompletionOutput) -> bytes:
        has_called = self._parser is not None and self._parser.num_calls > 0
        self._stop = stop_of(delta, has_called=has_called)
        events = self._close_block()
        events += _sse("message_delta", MessageDelta(self._stop, self._usage()))
        return events + _sse("message_stop", MessageStop())

    def _message(
        self, content: list[Block], reason: StopReason | None, sequence: str | None
    ) -> Message:
        return Message(self._id, self._model, content, reason, sequence, self._usage())

    def _usage(self) -> MessageUsage:
        num_cached = self._processor.num_cached_tokens
        num_computed = len(self._processor.request.token_ids) - num_cached
        return MessageUsage(num_computed, self._processor.num_tokens, num_cached)


def stop_of(delta: CompletionOutput, *, has_called: bool = False) -> MessageChange:
    """Return why an answer ended with its last delta."""
    if delta.finish_reason == "length":
        return MessageChange("max_tokens", None)
    if isinstance(delta.stop_reason, str):
        return MessageChange("stop_sequence", delta.stop_reason)
    return MessageChange("tool_use" if has_called else "end_turn", None)


def input_of(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; what is no object is the text of one key, `arguments`."""
    value = object_of(arguments or "{}")
    return value if isinstance(value, dict) else {"arguments": arguments}


def _sse(name: str, event: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode(event) + b"\n\n"
