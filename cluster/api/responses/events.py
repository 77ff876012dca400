"""A response as it grows: its events, numbered, and the whole of it at any moment.

The number of an event is a function of the answer's tokens: deltas come one for each token that has
text, so that whoever follows them anew, at any router, counts the same.
"""

from typing import Any, Literal

import msgspec

from cluster.api.response_builder import chat_logprobs
from cluster.api.responses.objects import (
    ErrorEvent,
    IncompleteDetails,
    InputTokensDetails,
    ItemEvent,
    ItemStatus,
    OutputItem,
    OutputTokensDetails,
    PartEvent,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseStatus,
    ResponseUsage,
)
from cluster.api.responses.output import Item, Kind, new_item, turn_of
from cluster.api.responses.record import ResponseRecord
from cluster.api.schemas.responses import ChatLogprob
from cluster.api.tools.chat_messages import call_id
from cluster.errors import InvalidRequest, Overloaded, TopworkError
from cluster.router.output_processor import CompletionOutput, OutputProcessor
from cluster.router.parser.families import MessageParser
from cluster.router.parser.message import MessageDelta
from cluster.router.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode
Boundary = Literal["added", "done"]


class ResponseEvents:
    """Spells one response; each method returns the events that what it is told makes.

    Events up to the number `after` are counted, and left out.
    """

    def __init__(
        self,
        record: ResponseRecord,
        tokenizer: Tokenizer,
        processor: OutputProcessor,
        after: float = -1,
    ) -> None:
        self.number = 0  # of the next event
        self._record = record
        self._tokenizer = tokenizer
        self._processor = processor  # that made the deltas: for the usage
        self._after = after
        self._items: list[Item] = []
        self._parser: MessageParser | None = None
        if record.message_format is not None:
            self._parser = MessageParser(record.message_format)
        self._status: ResponseStatus | None = None  # that it has ended with
        self._error: ResponseError | None = None

    @property
    def has_ended(self) -> bool:
        """Whether there will be no more events."""
        return self._status is not None

    @property
    def status(self) -> ResponseStatus:
        """What has become of the response."""
        if self._status is not None:
            return self._status
        is_queued = self._record.settings.background and not self._processor.num_tokens
        return "queued" if is_queued else "in_progress"

    @property
    def text(self) -> str:
        """What the answer says so far, but for thoughts and calls."""
        return "".join(item.text for item in self._items if item.kind == "message")

    def turn(self) -> dict[str, Any]:
        """Return the answer so far as a turn of the conversation."""
        return turn_of(self._items)

    def opening(self) -> bytes:
        """Return the events before the first token."""
        if not self._record.settings.background:
            names: tuple[ResponseStatus, ...] = ("in_progress",)
            first: ResponseStatus = "in_progress"
        else:
            names, first = ("queued", "in_progress"), "queued"
        created = self._of_response("response.created", self._response(first, []))
        return created + b"".join(
            self._of_response(f"response.{name}", self._response(name, [])) for name in names
        )

    def grow(self, delta: CompletionOutput) -> bytes:
        """Return the events of what the answer grew by."""
        logprobs = self._logprobs_of(delta)
        ends = delta.finish_reason is not None
        if self._parser is None:
            events = b"" if self._items else self._begin("message")
            if delta.text:
                events += self._add(delta.text, logprobs)
            elif logprobs:
                self._items[-1].logprobs += logprobs
        else:
            events = self._take(self._parser.feed(delta.text, ends=ends), logprobs)
        if delta.finish_reason is not None:
            events += self._end(delta.finish_reason)
        return events

    def _take(self, message: MessageDelta, logprobs: list[ChatLogprob]) -> bytes:
        """Return the events of what the answer, taken apart, grew by."""
        calls = message.tool_calls
        events = b"".join(self._add(call.arguments, []) for call in calls if call.name is None)
        if message.reasoning:
            events += self._to("reasoning") + self._add(message.reasoning, [])
        if message.content:
            events += self._to("message") + self._add(message.content, logprobs)
        for call in calls:
            if call.name is not None:
                assert self._record.message_format is not None, "what makes calls"
                way = self._record.message_format.tool_calls
                own_id = call_id(self._record.id, 0, call.index, way)
                events += self._begin("function_call", own_id, call.name)
                events += self._add(call.arguments, [])
        return events

    def _to(self, kind: Kind) -> bytes:
        """Return the events by which an item of this kind is the last one."""
        is_there = bool(self._items) and self._items[-1].kind == kind
        return b"" if is_there else self._begin(kind)

    def _begin(self, kind: Kind, own_id: str = "", name: str = "") -> bytes:
        """Return the events by which a new item begins, and the one before it ends."""
        events = self._close("completed") if self._items else b""
        item = new_item(kind, len(self._items), self._record.id, own_id, name)
        self._items.append(item)
        return events + self._item("added", item) + self._part("added", item)

    def _add(self, text: str, logprobs: list[ChatLogprob]) -> bytes:
        """Return the events by which the last item grows."""
        if not text:
            return b""
        item = self._items[-1]
        item.texts.append(text)
        item.logprobs += logprobs
        number = self._count()
        return self._told(item.delta(number, text, logprobs), number)

    def _close(self, status: ItemStatus) -> bytes:
        """Return the events by which the last item ends."""
        item = self._items[-1]
        item.status = status
        number = self._count()
        events = self._told(item.done(number), number)
        return events + self._part("done", item) + self._item("done", item)

    def fail(self, error: TopworkError) -> bytes:
        """Return the event by which the response fails."""
        self._error, self._status = ResponseError(_code(error), error.message), "failed"
        return self._of_response("response.failed", self.response())

    def break_off(self, error: TopworkError) -> bytes:
        """Return the event by which the reading fails, not the response."""
        event = ErrorEvent(self.number, error.code, error.message, error.param)
        return _sse("error", event)

    def response(self) -> Response:
        """Return the response as it is now."""
        status = self.status
        item_status: ItemStatus = "incomplete"
        if status in ("in_progress", "completed"):
            item_status = status
        items = [item.spelled(item.status or item_status) for item in self._items]
        return self._response(status, items)

    def _end(self, finish_reason: str) -> bytes:
        statuses: dict[str, ResponseStatus] = {"stop": "completed", "length": "incomplete"}
        self._status = statuses.get(finish_reason, "cancelled")
        is_whole = self._status == "completed"
        events = b"" if self._items else self._begin("message")
        events += self._close("completed" if is_whole else "incomplete")
        # OpenAI has no event for an answer that is cancelled; the response says what it is.
        name = "response.completed" if is_whole else "response.incomplete"
        return events + self._of_response(name, self.response())

    def _item(self, boundary: Boundary, item: Item) -> bytes:
        number = self._count()
        if boundary == "added":
            event = ItemEvent("response.output_item.added", number, item.empty(), item.index)
        else:
            whole = item.spelled(item.status or "in_progress")
            event = ItemEvent("response.output_item.done", number, whole, item.index)
        return self._told(event, number, event.type)

    def _part(self, boundary: Boundary, item: Item) -> bytes:
        part = item.part(is_whole=boundary == "done")
        if part is None:
            return b""
        number = self._count()
        if boundary == "added":
            event = PartEvent("response.content_part.added", number, item.id, part, item.index)
        else:
            event = PartEvent("response.content_part.done", number, item.id, part, item.index)
        return self._told(event, number, event.type)

    def _told(self, event: msgspec.Struct, number: int, name: str = "") -> bytes:
        """Return an event unless it is left out; without a name its own tag is that."""
        if number <= self._after:
            return b""
        return _sse(name or str(event.__struct_config__.tag), event)

    def _of_response(self, name: str, response: Response) -> bytes:
        number = self._count()
        return _sse(name, ResponseEvent(name, number, response)) if number > self._after else b""

    def _count(self) -> int:
        self.number += 1
        return self.number - 1

    def _logprobs_of(self, delta: CompletionOutput) -> list[ChatLogprob]:
        if not self._record.shows_logprobs:
            return []
        return chat_logprobs(self._tokenizer, delta.logprobs).content

    def _response(self, status: ResponseStatus, output: list[OutputItem]) -> Response:
        is_short = status == "incomplete"
        return Response(
            id=self._record.id,
            created_at=self._record.created_at,
            status=status,
            error=self._error,
            incomplete_details=IncompleteDetails("max_output_tokens") if is_short else None,
            output=output,
            usage=None if status in ("queued", "in_progress") else self._usage(),
            **msgspec.structs.asdict(self._record.settings),
        )

    def _usage(self) -> ResponseUsage:
        num_input = len(self._processor.request.token_ids)
        num_output = self._processor.num_tokens
        return ResponseUsage(
            num_input,
            InputTokensDetails(self._processor.num_cached_tokens),
            num_output,
            OutputTokensDetails(self._processor.num_reasoning_tokens or 0),
            num_input + num_output,
        )


def _sse(name: str, event: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode(event) + b"\n\n"


def _code(error: TopworkError) -> str:
    if isinstance(error, InvalidRequest):
        return "invalid_prompt"
    return "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
