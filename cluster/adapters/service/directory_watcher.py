"""Keeps the catalogue in step with adapter directories: at intervals, and when a name is missed.

A name that a call has loaded goes before a directory of that name; a name that a call has unloaded
stays out until its directory is touched. Knows nothing of schedulers.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from weakref import WeakValueDictionary

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.directories import Found, Watcher, probe, scan
from cluster.adapters.records import Source
from cluster.adapters.service.read_threads import ReadThreads
from cluster.errors import TopworkError

logger = logging.getLogger("topwork.pool")

FRESH_NANOSECONDS = 10**9  # file systems tell moments apart that are further apart than this


class NameLocks:
    """One lock for each name that is being changed; nobody waits for another name's."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, name: str) -> asyncio.Lock:
        """Return the lock of a name."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock


class DirectoryWatcher:
    """The sub-directories of some directories as adapters."""

    def __init__(
        self,
        directories: tuple[str, ...],
        roots: tuple[str, ...],
        pool: AdapterCatalog,
        reads: ReadThreads,
        locks: NameLocks,
        on_change: Callable[[], None],
    ) -> None:
        self.refused: dict[str, str] = {}  # why a sub-directory is no adapter, by name
        self._directories = directories
        self._roots = roots
        self._pool = pool
        self._reads = reads
        self._locks = locks
        self._on_change = on_change
        self._watcher = Watcher()

    @property
    def is_watching(self) -> bool:
        """Whether there is a directory to look at."""
        return bool(self._directories)

    def turn_to(self, directories: tuple[str, ...], roots: tuple[str, ...]) -> None:
        """Look at these from now on; what only others held is gone at the next look."""
        self._directories = directories
        self._roots = roots

    async def run(self, interval: float) -> None:
        """Look every `interval` seconds until cancelled."""
        while True:
            await asyncio.sleep(interval)
            await self.poll()

    async def poll(self) -> None:
        """Look once, and deal with what is new, touched or gone."""
        news, gone = self._watcher.pending(await self._reads.run(lambda: scan(self._directories)))
        for found in news:
            try:
                await self._take(found)
            except TopworkError as error:
                self._refuse(found.name, error)
        for name in gone:
            self._drop(name)

    async def find(self, name: str) -> bool:
        """Look for one name that is not in the catalogue; return whether it is there now.

        Raises:
            TopworkError: if there is a directory of that name that fails a check.
        """
        found = await self._reads.run(lambda: probe(self._directories, name))
        if found is not None and not self._watcher.is_done(found):
            await self._take(found)
        return name in self._pool

    def dismiss(self, name: str) -> None:
        """Leave a name as a call has made it, until its directory is touched."""
        self._watcher.dismiss(name)

    async def _take(self, found: Found) -> None:
        """Register what is new; publish what is touched, if anybody knows what it was."""
        source = Source(found.path, self._roots)
        async with self._locks.of(found.name):
            before = self._pool.history(found.name)
            if before is not None and not before.watched:
                self._watcher.done(found)
                return
            if before is None or before.current.digest is None:
                outline = await self._reads.outline(source)
                if self._pool.history(found.name) is not before:
                    return  # changed by a call: the next look tells what is to be done
                if before is None or before.current.outline != outline:
                    is_known = before is not None
                    self._pool.register(found.name, outline, load_inplace=is_known, watched=True)
            else:
                loaded = await self._reads.whole(source)
                if self._pool.history(found.name) is not before:
                    return
                outline = loaded.facts.outline
                self._pool.publish(
                    found.name, loaded, load_inplace=True, pinned=before.pinned, watched=True
                )
            is_fresh = time.time_ns() - found.touched < FRESH_NANOSECONDS
            self._watcher.done(Found(found.name, found.path, outline.stamp), is_fresh=is_fresh)
            self.refused.pop(found.name, None)
        self._on_change()

    def _drop(self, name: str) -> None:
        history = self._pool.history(name)
        self._watcher.gone(name)
        self.refused.pop(name, None)
        if history is not None and history.watched:
            self._pool.unload(name)
            self._on_change()

    def _refuse(self, name: str, error: TopworkError) -> None:
        if self.refused.get(name) != error.message:
            logger.warning("%s is not served: %s", name, error)
            self.refused[name] = error.message
