"""Which adapters of the staging folder are needed: those of kept versions and of running reads.

What nothing needs any more is deleted in the background, and only when that is saved: a pool that
comes back finds the files of everything that it was told.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

from cluster.adapters.records import Source
from cluster.adapters.sources.staging import Incoming, StagingFolder, StagingLocked, no_staging
from cluster.errors import Unavailable
from cluster.supervision import supervise

logger = logging.getLogger("topwork.pool")

TASK = "adapter_staging"
RETRY_SECONDS = 1.0
LOCK_TIMEOUT = 15.0  # seconds until a process before this one must have ended
LOCK_INTERVAL = 0.05
T = TypeVar("T")


class StagedAdapters:
    """The folder as the pool's loop sees it; without a `path` there is none.

    `is_used` tells whether anything in the catalogue would read a directory, `saved` waits until
    its changes are saved, `on_failure` counts tasks that fail. What is arriving takes
    `max_incoming` bytes of weights at most.
    """

    def __init__(
        self,
        path: str | None,
        is_used: Callable[[str], bool],
        saved: Callable[[], Awaitable[None]],
        on_failure: Callable[[str], None],
        max_incoming: int,
    ) -> None:
        self._folder = None if path is None else StagingFolder(Path(path), max_incoming)
        self._is_used = is_used
        self._saved = saved
        self._on_failure = on_failure
        self._held: Counter[str] = Counter()  # paths that something is being done with
        self._released: dict[str, None] = {}  # perhaps nobody needs them
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        # One: a removal and a new arrival of the same bytes come one after the other.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staging")

    async def open(self) -> None:
        """Take over the folder, once the catalogue knows what it had.

        Raises:
            Unavailable: if it cannot be used.
        """
        if self._folder is None or self._task is not None:
            return
        for place in await self._locked(self._folder):
            self.release(str(place))
        self._task = asyncio.create_task(supervise(TASK, self._run, self._on_failure))

    async def close(self) -> None:
        """End the work in the background and let go of the folder."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)
        if self._folder is not None:
            self._folder.close()

    def holds(self, path: str) -> bool:
        """Tell whether a directory is one of the folder's."""
        return self._folder is not None and os.path.dirname(path) == str(self._folder.path)

    def source(self, path: str) -> Source:
        """Return one of the folder's directories to read; no link leads out of it."""
        return Source(path, (os.path.dirname(path),))

    def release(self, path: str) -> None:
        """Look whether one of the folder's directories can go, when something has let go of it."""
        if self.holds(path):
            self._released[path] = None
            self._idle.clear()
            self._wake.set()

    async def begin(self, max_bytes: int, announced: int = 0) -> Incoming:
        """Begin to take in an adapter, which whoever began it places or discards.

        Raises:
            InvalidRequest: if there is no folder.
            Overloaded: if there is no room for what is announced, in bytes.
            Unavailable: if the disk refuses.
        """
        if self._folder is None:
            raise no_staging()
        if self._task is None:
            raise Unavailable("the adapter pool is starting", retry_after=1)
        self._folder.room.check(announced)
        return await asyncio.to_thread(self._folder.incoming, max_bytes)

    @asynccontextmanager
    async def placed(self, incoming: Incoming) -> AsyncIterator[Source]:
        """Have a sealed adapter in its place; it stays beyond this if the catalogue uses it.

        Raises:
            Unavailable: if the disk refuses.
        """
        folder = self._folder
        assert folder is not None, "something has come"
        path = str(folder.place_of(incoming))
        with self._hold(path):
            await self._run_in_thread(lambda: folder.place(incoming))
            yield self.source(path)

    async def idle(self) -> None:
        """Wait until all is deleted that nothing needs."""
        await self._idle.wait()

    @contextmanager
    def _hold(self, path: str) -> Iterator[None]:
        self._held[path] += 1
        try:
            yield
        finally:
            self._held[path] -= 1
            if not self._held[path]:
                del self._held[path]
                self.release(path)

    async def _run(self) -> None:
        """Delete what is released, until cancelled."""
        folder = self._folder
        assert folder is not None, "there is a folder"
        while True:
            if not self._released:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
            try:
                await self._saved()
            except Unavailable:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            path = next(iter(self._released))
            del self._released[path]
            if not self._held[path] and not self._is_used(path):
                # Nobody waits between the question and the order: what comes now comes after it.
                await self._run_in_thread(lambda path=path: folder.remove(Path(path)))  # type: ignore[misc]

    async def _locked(self, folder: StagingFolder) -> list[Path]:
        """Open the folder as soon as a process that had it before has ended."""
        deadline = asyncio.get_running_loop().time() + LOCK_TIMEOUT
        while True:
            try:
                return await self._run_in_thread(folder.open)
            except StagingLocked as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise Unavailable(
                        f"adapter_staging: {error}: each server needs its own folder"
                    ) from error
            await asyncio.sleep(LOCK_INTERVAL)

    async def _run_in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
