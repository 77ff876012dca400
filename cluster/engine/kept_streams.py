"""Calls whose streams are kept when their reader is gone, for a while, for whoever claims them.

A router asks for it with the call, says what a reader needs to know to go on with it, and may die
then: any router can claim the call by its id, and gets all events so far and the rest. What a call
said is kept when it has ended, too: so many calls and bytes of them, of which the oldest go first.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from cluster.errors import ErrorInfo, Overloaded
from cluster.messages import Claimed, Keep
from cluster.request import Request, TokenEvent
from cluster.tenancy.usage import NO_USAGE, Usage

MAX_ENDED = 4096  # calls that have ended and wait for nobody in particular; the oldest go first
MAX_ENDED_BYTES = 256 * 1024 * 1024  # of those; likewise
MAX_RECORD_BYTES = 256 * 1024 * 1024  # of the records of calls that run: one more is refused
RETRY_AFTER_SECONDS = 5
CLAIMED = ErrorInfo("Conflict", "the stream is read by another connection now")

# What Python takes for them, about.
_TOKEN_BYTES = 36
_EVENT_BYTES = 240
_ALTERNATIVE_BYTES = 120
_CALL_BYTES = 2000


@dataclass(slots=True, eq=False)
class KeptCall:
    """All choices of one prompt."""

    keep: Keep
    requests: tuple[Request, ...]
    events: list[list[TokenEvent]]  # of each choice, all so far
    num_told: list[int]  # of each choice, tokens that some router has had
    reader: object  # the router that has begun or claimed it last
    timer: asyncio.TimerHandle | None = None  # runs while nobody reads, or when all have ended
    num_bytes: int = 0  # as it counts among those that have ended; 0: it has not

    @property
    def has_ended(self) -> bool:
        """Whether each choice has its last event."""
        return all(events and events[-1].finish_reason is not None for events in self.events)

    def claimed(self, call_id: int, prefix: str) -> Claimed:
        """Return the answer to whoever claims it, or looks."""
        events = tuple(tuple(of_one) for of_one in self.events)
        told = tuple(self.num_told)
        return Claimed(call_id, prefix, self.keep.record, self.requests, events, told)

    def take_untold(self, index: int, num_tokens: int) -> Usage:
        """Return what no router has had of a choice with so many tokens; from here on it has."""
        told, self.num_told[index] = self.num_told[index], num_tokens
        if told == num_tokens:
            return NO_USAGE
        usage = Usage(requests=0 if told else 1, generation_tokens=num_tokens - told)
        if told or index:  # the first choice computes the prompt for the others
            return usage
        cached = max(event.num_cached_tokens for event in self.events[index])
        return usage.plus(Usage(0, len(self.requests[index].token_ids) - cached, cached))


@dataclass(slots=True)
class KeptStreams:
    """The calls by id; `drop` ends what runs of a call that nobody has claimed in time."""

    drop: Callable[[KeptCall], None]
    _calls: dict[str, KeptCall] = field(default_factory=dict)
    _ended: dict[KeptCall, None] = field(default_factory=dict)  # in order of their end
    _num_ended_bytes: int = 0
    _num_record_bytes: int = 0  # of calls that have not ended

    def check_room(self, keep: Keep) -> None:
        """Raise Overloaded if a call that begins cannot be kept."""
        if self._num_record_bytes + len(keep.record) > MAX_RECORD_BYTES:
            message = f"the calls that run and are kept have {self._num_record_bytes} bytes"
            raise Overloaded(message, retry_after=RETRY_AFTER_SECONDS)

    def add(self, keep: Keep, requests: tuple[Request, ...], reader: object) -> KeptCall:
        """Keep a call that begins, or that goes on here behind the tokens that it has."""
        before = self._calls.get(keep.stream_id)
        if before is not None:  # its router took this engine for lost, and has come back
            self._expire(before)
        told = [len(request.output_token_ids) for request in requests]
        call = KeptCall(keep, requests, [_given(request) for request in requests], told, reader)
        self._calls[keep.stream_id] = call
        self._num_record_bytes += len(keep.record)
        return call

    def get(self, stream_id: str) -> KeptCall | None:
        """Return a call that is read, or waits to be."""
        return self._calls.get(stream_id)

    def read(self, call: KeptCall) -> None:
        """Note that somebody reads a call again."""
        if call.timer is not None and not call.has_ended:
            call.timer.cancel()
            call.timer = None

    def unread(self, call: KeptCall) -> None:
        """Note that nobody reads a call."""
        seconds = call.keep.unread_seconds
        if seconds is None:
            seconds = call.keep.seconds
        if call.timer is None and call.keep.stream_id in self._calls and seconds < inf:
            self._expire_in(call, seconds)

    def end(self, call: KeptCall) -> None:
        """Note that there is no more to come; forget the oldest if that is too much."""
        if self._calls.get(call.keep.stream_id) is not call or call.num_bytes:
            return
        if call.timer is not None:
            call.timer.cancel()
        self._expire_in(call, call.keep.seconds)
        self._num_record_bytes -= len(call.keep.record)
        call.num_bytes = _size_of(call)
        self._num_ended_bytes += call.num_bytes
        self._ended[call] = None
        while len(self._ended) > MAX_ENDED or self._num_ended_bytes > MAX_ENDED_BYTES:
            self.forget(next(iter(self._ended)))

    def forget(self, call: KeptCall) -> None:
        """Keep a call no more; whatever runs of it is the caller's."""
        if self._calls.get(call.keep.stream_id) is not call:
            return
        del self._calls[call.keep.stream_id]
        if call.timer is not None:
            call.timer.cancel()
        if call.num_bytes:
            del self._ended[call]
            self._num_ended_bytes -= call.num_bytes
        else:
            self._num_record_bytes -= len(call.keep.record)

    def close(self) -> None:
        """Forget all."""
        for call in tuple(self._calls.values()):
            self.forget(call)

    def _expire_in(self, call: KeptCall, seconds: float) -> None:
        call.timer = asyncio.get_running_loop().call_later(seconds, self._expire, call)

    def _expire(self, call: KeptCall) -> None:
        self.forget(call)
        self.drop(call)


def _given(request: Request) -> list[TokenEvent]:
    """Return as an event what a request brings from an engine that is gone."""
    if not request.output_token_ids:
        return []
    return [TokenEvent(request.request_id, request.output_token_ids)]


def _size_of(call: KeptCall) -> int:
    """Return about how many bytes a call takes."""
    num_tokens = sum(len(request.token_ids) for request in call.requests)
    num_bytes = _CALL_BYTES + len(call.keep.record) + num_tokens * _TOKEN_BYTES
    for events in call.events:
        for event in events:
            num_top = sum(len(alternatives) for alternatives in event.top_logprobs)
            num_bytes += _EVENT_BYTES + len(event.token_ids) * _TOKEN_BYTES
            num_bytes += num_top * _ALTERNATIVE_BYTES
    return num_bytes
