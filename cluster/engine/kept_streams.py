"""Calls whose streams are kept when their reader is gone, for a while, for whoever claims them.

A router asks for it with the call, says what a reader needs to know to go on with it, and may die
then: any router can claim the call by its id, and gets all events so far and the rest.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.errors import ErrorInfo
from cluster.messages import Keep
from cluster.request import Request, TokenEvent

MAX_ENDED = 1024  # calls that have ended and wait for nobody in particular; the oldest go first
CLAIMED = ErrorInfo("Conflict", "the stream is read by another connection now")


@dataclass(slots=True, eq=False)
class KeptCall:
    """All choices of one prompt."""

    keep: Keep
    requests: tuple[Request, ...]
    events: list[list[TokenEvent]]  # of each choice, all so far
    timer: asyncio.TimerHandle | None = None  # runs while nobody reads, or when all have ended

    @property
    def has_ended(self) -> bool:
        """Whether each choice has its last event."""
        return all(events and events[-1].finish_reason is not None for events in self.events)


@dataclass(slots=True)
class KeptStreams:
    """The calls by id; `drop` ends what runs of a call that nobody has claimed in time."""

    drop: Callable[[KeptCall], None]
    _calls: dict[str, KeptCall] = field(default_factory=dict)

    def add(self, keep: Keep, requests: tuple[Request, ...]) -> KeptCall:
        """Keep a call that begins, or that goes on here behind the tokens that it has."""
        call = KeptCall(keep, requests, [_given(request) for request in requests])
        self._calls[keep.stream_id] = call
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
        """Note that nobody reads a call, or that there is no more to come."""
        if call.timer is None and call.keep.stream_id in self._calls:
            loop = asyncio.get_running_loop()
            call.timer = loop.call_later(call.keep.seconds, self._expire, call)
            ended = [one for one in self._calls.values() if one.has_ended]
            for oldest in ended[: max(0, len(ended) - MAX_ENDED)]:
                self._expire(oldest)

    def close(self) -> None:
        """Forget all."""
        for call in tuple(self._calls.values()):
            self._forget(call)

    def _expire(self, call: KeptCall) -> None:
        self._forget(call)
        self.drop(call)

    def _forget(self, call: KeptCall) -> None:
        self._calls.pop(call.keep.stream_id, None)
        if call.timer is not None:
            call.timer.cancel()


def _given(request: Request) -> list[TokenEvent]:
    """Return as an event what a request brings from an engine that is gone."""
    if not request.output_token_ids:
        return []
    return [TokenEvent(request.request_id, request.output_token_ids)]
