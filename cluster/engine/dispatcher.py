"""The way of events back to routers: one message per step to each, and the timers of deadlines."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cluster.engine.metrics import EngineMetrics
from cluster.engine.server import RouterConnection
from cluster.messages import Events
from cluster.request import ErrorInfo, Request, TokenEvent


@dataclass(slots=True)
class _Stream:
    router: RouterConnection
    request_id: str
    timer: asyncio.TimerHandle | None


class Dispatcher:
    """The stream of every sequence that has not ended: which router asked, and until when."""

    def __init__(
        self, timeout: float | None, expire: Callable[[int], None], metrics: EngineMetrics
    ) -> None:
        self._timeout = timeout  # seconds that a request may take; None: as long as it likes
        self._expire = expire
        self._metrics = metrics
        self._streams: dict[int, _Stream] = {}  # by sequence

    @property
    def num_streams(self) -> int:
        """Sequences whose events a router waits for."""
        return len(self._streams)

    def add(
        self, router: RouterConnection, seq_ids: Sequence[int], requests: Sequence[Request]
    ) -> None:
        """Send the events of these sequences to this router from now on."""
        self._metrics.arrived(seq_ids)
        for seq_id, request in zip(seq_ids, requests, strict=True):
            timer = None
            if self._timeout is not None:
                loop = asyncio.get_running_loop()
                timer = loop.call_later(self._timeout, self._expire, seq_id)
            self._streams[seq_id] = _Stream(router, request.request_id, timer)
            router.sequences[request.request_id] = seq_id

    def remove(self, router: RouterConnection, request_id: str) -> int | None:
        """Forget a request and return its sequence; None if it has ended already."""
        seq_id = router.sequences.get(request_id)
        if seq_id is not None:
            self._forget(seq_id)
        return seq_id

    def deliver(self, events: Iterable[tuple[int, TokenEvent]]) -> None:
        """Send each router one message with all events of its requests."""
        by_router: dict[RouterConnection, list[TokenEvent]] = {}
        for seq_id, event in events:
            stream = self._streams.get(seq_id)
            if stream is None:
                continue  # aborted while the step ran
            by_router.setdefault(stream.router, []).append(event)
            is_end = event.finish_reason is not None
            self._metrics.delivered(seq_id, has_token=bool(event.token_ids), is_end=is_end)
            if is_end:
                self._forget(seq_id)
        for router, router_events in by_router.items():
            router.send(Events(tuple(router_events)))

    def fail_all(self, error: ErrorInfo) -> None:
        """End every request with an error."""
        self.deliver(
            [
                (seq_id, TokenEvent(stream.request_id, finish_reason="error", error=error))
                for seq_id, stream in self._streams.items()
            ]
        )

    def _forget(self, seq_id: int) -> None:
        stream = self._streams.pop(seq_id)
        del stream.router.sequences[stream.request_id]
        self._metrics.removed(seq_id)
        if stream.timer is not None:
            stream.timer.cancel()
