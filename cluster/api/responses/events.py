"""A response as it grows: its events, numbered, and the whole of it at any moment.

The number of an event is a function of the answer's tokens: deltas come one for each token that has
text, so that whoever follows them anew, at any router, counts the same.
"""

from typing import Literal

import msgspec

from cluster.api.response_builder import chat_logprobs
from cluster.api.responses.objects import (
    ErrorEvent,
    IncompleteDetails,
    InputTokensDetails,
    ItemEvent,
    ItemStatus,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    PartEvent,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseStatus,
    ResponseUsage,
    TextDeltaEvent,
    TextDoneEvent,
)
from cluster.api.responses.record import ResponseRecord
from cluster.api.schemas.responses import ChatLogprob
from cluster.errors import InvalidRequest, Overloaded, TopworkError
from cluster.router.output_processor import CompletionOutput, OutputProcessor
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
        self._item_id = f"msg_{record.id.removeprefix('resp_')}"
        self._texts: list[str] = []
        self._logprobs: list[ChatLogprob] = []
        self._has_item = False
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
        """What the answer says so far."""
        return "".join(self._texts)

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
        self._logprobs += logprobs
        events = b""
        if not self._has_item:
            self._has_item = True
            events += self._item("added", "in_progress") + self._part("added")
        if delta.text:
            self._texts.append(delta.text)
            number = self._count()
            if number > self._after:
                event = TextDeltaEvent(number, self._item_id, delta.text, logprobs)
                events += _sse("response.output_text.delta", event)
        if delta.finish_reason is not None:
            events += self._end(delta.finish_reason)
        return events

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
        return self._response(status, [self._message(item_status)] if self._has_item else [])

    def _end(self, finish_reason: str) -> bytes:
        statuses: dict[str, ResponseStatus] = {"stop": "completed", "length": "incomplete"}
        self._status = statuses.get(finish_reason, "cancelled")
        number = self._count()
        events = b""
        if number > self._after:
            done = TextDoneEvent(number, self._item_id, self.text, self._logprobs)
            events = _sse("response.output_text.done", done)
        is_whole = self._status == "completed"
        events += self._part("done") + self._item("done", "completed" if is_whole else "incomplete")
        # OpenAI has no event for an answer that is cancelled; the response says what it is.
        name = "response.completed" if is_whole else "response.incomplete"
        return events + self._of_response(name, self.response())

    def _item(self, boundary: Boundary, status: ItemStatus) -> bytes:
        number = self._count()
        if number <= self._after:
            return b""
        item = self._message(status)
        if boundary == "added":
            item.content = []
            event = ItemEvent("response.output_item.added", number, item)
        else:
            event = ItemEvent("response.output_item.done", number, item)
        return _sse(event.type, event)

    def _part(self, boundary: Boundary) -> bytes:
        number = self._count()
        if number <= self._after:
            return b""
        if boundary == "added":
            part = OutputText("", [])
            event = PartEvent("response.content_part.added", number, self._item_id, part)
        else:
            part = OutputText(self.text, self._logprobs)
            event = PartEvent("response.content_part.done", number, self._item_id, part)
        return _sse(event.type, event)

    def _of_response(self, name: str, response: Response) -> bytes:
        number = self._count()
        return _sse(name, ResponseEvent(name, number, response)) if number > self._after else b""

    def _count(self) -> int:
        self.number += 1
        return self.number - 1

    def _message(self, status: ItemStatus) -> OutputMessage:
        return OutputMessage(self._item_id, status, [OutputText(self.text, self._logprobs)])

    def _logprobs_of(self, delta: CompletionOutput) -> list[ChatLogprob]:
        if not self._record.shows_logprobs:
            return []
        return chat_logprobs(self._tokenizer, delta.logprobs).content

    def _response(self, status: ResponseStatus, output: list[OutputMessage]) -> Response:
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
            OutputTokensDetails(),
            num_input + num_output,
        )


def _sse(name: str, event: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode(event) + b"\n\n"


def _code(error: TopworkError) -> str:
    if isinstance(error, InvalidRequest):
        return "invalid_prompt"
    return "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
