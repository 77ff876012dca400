"""Keeps loads that nobody waits for apart in time, while sequences run somewhere.

Each load takes a little of the cores that the ranks compute on; in a burst of them all running
streams would slow down together. Knows nothing of what is loaded.
"""

import asyncio
from collections.abc import Awaitable, Callable


class RateLimiter:
    """Lets one in at a time; `is_busy` tells whether anybody would notice.

    `gap` is in seconds, from the beginning of one load to that of the next.
    """

    def __init__(self, is_busy: Callable[[], Awaitable[bool]], gap: float) -> None:
        self._is_busy = is_busy
        self._gap = gap
        self._turn = asyncio.Lock()
        self._last: float | None = None  # when the one before began, by the loop's clock

    async def take(self) -> None:
        """Wait for a turn, in order of arrival."""
        clock = asyncio.get_running_loop().time
        async with self._turn:
            rest = 0.0 if self._last is None else self._last + self._gap - clock()
            if rest > 0 and await self._is_busy():
                await asyncio.sleep(rest)
            self._last = clock()
