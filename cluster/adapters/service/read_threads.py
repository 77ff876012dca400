"""Reading and cutting adapters in threads of their own, away from the event loop.

Owns the threads and the sharing of reads: who asks for a directory that is being read already waits
for that read. The threads are niced, so that loading takes what the ranks leave. Knows nothing of
names or versions.
"""

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cluster.adapters.contents import Loaded
from cluster.adapters.peft.reader import AdapterReader
from cluster.adapters.records import Outline, Source
from cluster.adapters.service.shard_builder import ShardBuilder
from cluster.errors import TopworkError
from cluster.histogram import LOAD_BUCKETS, Histogram

T = TypeVar("T")

NICENESS = 10


class ReadThreads:
    """Adapter directories, read in the background."""

    def __init__(self, reader: AdapterReader, cutter: ShardBuilder, num_threads: int) -> None:
        self._reader = reader
        self._cutter = cutter
        self._threads = ThreadPoolExecutor(
            num_threads, thread_name_prefix="adapters", initializer=_be_nice
        )
        self._under_way: dict[Source, asyncio.Task[Loaded]] = {}
        self.seconds = Histogram(LOAD_BUCKETS)
        self.results = {"ok": 0, "failed": 0}  # of whole reads

    async def outline(self, source: Source) -> Outline:
        """Read what tells whether it fits; raises as AdapterReader does."""
        return await self.run(lambda: self._reader.outline(source))

    async def whole(self, source: Source) -> Loaded:
        """Read all of it, as it is from now on, and cut it.

        Raises as AdapterReader and ShardBuilder do.
        """

        def read() -> Loaded:
            outline, adapter = self._reader.whole(source)
            with self._reader.turn:
                return self._cutter.load(outline, adapter)

        began = time.monotonic()
        try:
            loaded = await self.run(read)
        except TopworkError:
            self.results["failed"] += 1
            raise
        self.results["ok"] += 1
        self.seconds.observe(time.monotonic() - began)
        return loaded

    async def shared(self, source: Source) -> Loaded:
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

    def _end(self, source: Source, done: asyncio.Task[Loaded]) -> None:
        del self._under_way[source]
        if not done.cancelled():
            done.exception()  # all who waited may have gone


def _be_nice() -> None:
    os.nice(NICENESS)  # on Linux, of this thread alone
