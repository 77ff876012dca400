"""Where the events of one call's requests meet their reader."""

import asyncio

from cluster.messages import RequestTimes
from cluster.request import TokenEvent


class EventQueue:
    """Where the events of one call's requests arrive; a slow reader finds several at once."""

    def __init__(self) -> None:
        self.times: dict[str, RequestTimes] = {}  # the last ones of each request that asks
        self._events: list[TokenEvent] = []
        self._is_woken = False
        self._reader: asyncio.Future[None] | None = None

    def put(self, event: TokenEvent) -> None:
        """Add one event."""
        self._events.append(event)
        self._rouse()

    def wake(self) -> None:
        """Let the reader go on without an event."""
        self._is_woken = True
        self._rouse()

    async def get(self) -> list[TokenEvent]:
        """Wait for events and return all that are here, in order of arrival; after `wake`, none."""
        if not self._events and not self._is_woken:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        events, self._events = self._events, []
        self._is_woken = False
        return events

    def _rouse(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
