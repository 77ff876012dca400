"""Where the events of a call's requests arrive, whichever schedulers send them.

Knows nothing of connections: whoever has one delivers here.
"""

import asyncio

from cluster.request import TokenEvent


class EventQueue:
    """Where the events of one call's requests arrive; a slow reader finds several at once."""

    def __init__(self) -> None:
        self._events: list[TokenEvent] = []
        self._reader: asyncio.Future[None] | None = None  # who waits, if anybody does

    def deliver(self, event: TokenEvent) -> None:
        """Add one event."""
        self._events.append(event)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def receive(self) -> list[TokenEvent]:
        """Wait for events and return all that are here, in order of arrival."""
        if not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        events, self._events = self._events, []
        return events
