"""Reads adapters and cuts them into shards in threads, away from the event loop.

Who asks for a directory that is being read already waits for that read. Loads that nobody waits for
are kept apart in time.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cluster.adapters.adapter import Adapter
from cluster.adapters.loaded_adapters import LoadedAdapter
from cluster.adapters.peft.reader import AdapterReader
from cluster.adapters.records import Outline, Source
from cluster.adapters.service.read_room import ReadRoom
from cluster.errors import TopworkError
from cluster.histogram import LOAD_BUCKETS, Histogram

T = TypeVar("T")


class ReadThreads:
    """Adapter directories, read in the background; `num_bytes` of weights at a time."""

    def __init__(
        self,
        reader: AdapterReader,
        cut: Callable[[Outline, Adapter], LoadedAdapter],
        num_threads: int,
        num_bytes: int,
    ) -> None:
        self.room = ReadRoom(num_bytes)
        self._reader = reader
        self._cut = cut
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="adapters")
        self._under_way: dict[Source, asyncio.Task[LoadedAdapter]] = {}
        self.seconds = Histogram(LOAD_BUCKETS)
        self.results = {"ok": 0, "failed": 0}  # of whole reads

    async def outline(self, source: Source) -> Outline:
        """Read what tells whether it fits; raises as AdapterReader does."""
        return await self.run(lambda: self._reader.outline(source))

    async def whole(self, source: Source) -> LoadedAdapter:
        """Read all of it, as it is from now on, and cut it.

        Raises as AdapterReader and `cut` do.
        """

        def read() -> LoadedAdapter:
            with self.room.entered() as take:
                outline, adapter = self._reader.whole(source, take)
                with self._reader.turn:
                    return self._cut(outline, adapter)

        began = time.monotonic()
        try:
            loaded = await self.run(read)
        except TopworkError:
            self.results["failed"] += 1
            raise
        self.results["ok"] += 1
        self.seconds.observe(time.monotonic() - began)
        return loaded

    async def shared(self, source: Source) -> LoadedAdapter:
        """Read all of it, together with all who want it now; a failure is theirs alone."""
        reading = self._under_way.get(source)
        if reading is None:
            reading = asyncio.create_task(self.whole(source))
            self._under_way[source] = reading
            reading.add_done_callback(lambda done: self._end(source, done))
        return await asyncio.shield(reading)

    async def run(self, work: Callable[[], T]) -> T:
        """Do what blocks in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """End the threads when they have done what they do."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end(self, source: Source, done: asyncio.Task[LoadedAdapter]) -> None:
        del self._under_way[source]
        if not done.cancelled():
            done.exception()  # all who waited may have gone


class RateLimiter:
    """Keeps loads that nobody waits for apart in time, while sequences run somewhere.

    Each load takes a little of the cores that the ranks compute on; in a burst of them all running
    streams would slow down together. `is_busy` tells whether any would notice; `gap` is in seconds,
    from the beginning of one load to that of the next.
    """

    def __init__(self, is_busy: Callable[[], Awaitable[bool]], gap: float) -> None:
        self._is_busy = is_busy
        self._gap = gap
        self._turn = asyncio.Lock()
        self._last: float | None = None  # when the one before began, by the loop's clock

    async def acquire(self) -> None:
        """Wait for a turn, in order of arrival."""
        clock = asyncio.get_running_loop().time
        async with self._turn:
            rest = 0.0 if self._last is None else self._last + self._gap - clock()
            if rest > 0 and await self._is_busy():
                await asyncio.sleep(rest)
            self._last = clock()
