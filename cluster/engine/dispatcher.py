"""Whose sequences are whose: which router asked, and how long each request may still take.

Owns the way of events back to routers, one message per step to each, and the timers of deadlines.
Knows nothing of what a scheduler decides.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cluster.engine.metrics import EngineMetrics
from cluster.engine.server import RouterConnection
from cluster.messages import Events
from cluster.request import ErrorInfo, Request, TokenEvent


@dataclass(slots=True)
class _Owner:
    router: RouterConnection
    request_id: str
    timer: asyncio.TimerHandle | None


class Dispatcher:
    """Every sequence that somebody still wants to hear of."""

    def __init__(
        self, timeout: float | None, expire: Callable[[int], None], measures: EngineMetrics
    ) -> None:
        self._timeout = timeout  # seconds that a request may take; None: as long as it likes
        self._expire = expire
        self._measures = measures
        self._by_sequence: dict[int, _Owner] = {}

    @property
    def count(self) -> int:
        """Sequences that somebody waits for."""
        return len(self._by_sequence)

    def enter(
        self, router: RouterConnection, seq_ids: Sequence[int], requests: Sequence[Request]
    ) -> None:
        """Send the events of these sequences to this router from now on."""
        self._measures.arrived(seq_ids)
        for seq_id, request in zip(seq_ids, requests, strict=True):
            timer = None
            if self._timeout is not None:
                loop = asyncio.get_running_loop()
                timer = loop.call_later(self._timeout, self._expire, seq_id)
            self._by_sequence[seq_id] = _Owner(router, request.request_id, timer)
            router.sequences[request.request_id] = seq_id

    def leave(self, router: RouterConnection, request_id: str) -> int | None:
        """Forget a request and return its sequence; None if it has ended already."""
        seq_id = router.sequences.get(request_id)
        if seq_id is not None:
            self._forget(seq_id)
        return seq_id

    def deliver(self, events: Iterable[tuple[int, TokenEvent]]) -> None:
        """Send each router one message with all the news of its requests."""
        by_router: dict[RouterConnection, list[TokenEvent]] = {}
        for seq_id, event in events:
            owner = self._by_sequence.get(seq_id)
            if owner is None:
                continue  # aborted while the step ran
            by_router.setdefault(owner.router, []).append(event)
            is_end = event.finish_reason is not None
            self._measures.told(seq_id, has_token=bool(event.token_ids), is_end=is_end)
            if is_end:
                self._forget(seq_id)
        for router, news in by_router.items():
            router.send(Events(tuple(news)))

    def fail_all(self, error: ErrorInfo) -> None:
        """End every request with an error."""
        self.deliver(
            [
                (seq_id, TokenEvent(owner.request_id, finish_reason="error", error=error))
                for seq_id, owner in self._by_sequence.items()
            ]
        )

    def _forget(self, seq_id: int) -> None:
        owner = self._by_sequence.pop(seq_id)
        del owner.router.sequences[owner.request_id]
        self._measures.left(seq_id)
        if owner.timer is not None:
            owner.timer.cancel()
