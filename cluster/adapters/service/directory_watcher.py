"""Keeps the catalogue in step with adapter directories: at intervals, and when a name is missed.

A name that a call has loaded goes before a directory of that name; a name that a call has unloaded
stays out until its directory is touched.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from weakref import WeakValueDictionary

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.directories import AdapterDirectory, DirectoryChanges, probe, scan
from cluster.adapters.records import Source
from cluster.adapters.service.read_threads import ReadThreads
from cluster.errors import Internal, TopworkError

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
    """The sub-directories of some directories as adapters; `on_change` follows the catalogue."""

    def __init__(
        self,
        directories: tuple[str, ...],
        roots: tuple[str, ...],
        catalog: AdapterCatalog,
        threads: ReadThreads,
        locks: NameLocks,
        on_change: Callable[[], None],
    ) -> None:
        self.refused: dict[str, str] = {}  # why a sub-directory is no adapter, by name
        self._directories = directories
        self._roots = roots
        self._catalog = catalog
        self._threads = threads
        self._locks = locks
        self._on_change = on_change
        self.changes = DirectoryChanges()

    @property
    def is_watching(self) -> bool:
        """Whether there is a directory to look at."""
        return bool(self._directories)

    def watch(self, directories: tuple[str, ...], roots: tuple[str, ...]) -> None:
        """Look at these from now on; what only others held is gone at the next look."""
        self._directories = directories
        self._roots = roots

    def roots_of(self, directory: str) -> tuple[str, ...]:
        """Return what confines the reading of sub-directories, if they are looked at here."""
        return self._roots if directory in self._directories else ()

    async def run(self, interval: float, delay: float) -> None:
        """Look after `delay` seconds, then every `interval` seconds, until cancelled."""
        await asyncio.sleep(delay)
        while True:
            await self.poll()
            await asyncio.sleep(interval)

    async def poll(self) -> None:
        """Look once, and deal with what is new, touched or gone."""
        seen = await self._threads.run(lambda: scan(self._directories))
        changed, gone = self.changes.pending(seen)
        for found in changed:
            try:
                await self._take(found)
            except TopworkError as error:
                self._refuse(found.name, error)
            except Exception as error:  # a bug, which must not keep out those behind it
                logger.exception("adapter directory %s", found.path)
                self._refuse(found.name, Internal(f"{type(error).__name__}: {error}"))
        for name in gone:
            self._drop(name)

    async def find(self, name: str) -> bool:
        """Look for one name that is not in the catalogue; return whether it is there now.

        Raises:
            TopworkError: if there is a directory of that name that fails a check.
        """
        found = await self._threads.run(lambda: probe(self._directories, name))
        if found is not None and not self.changes.is_done(found):
            await self._take(found)
        return name in self._catalog

    def dismiss(self, name: str) -> None:
        """Leave a name as a call has made it, until its directory is touched."""
        self.changes.dismiss(name)

    async def _take(self, found: AdapterDirectory) -> None:
        """Register what is new; publish what is touched, if anybody knows what it was."""
        source = Source(found.path, self._roots)
        async with self._locks.of(found.name):
            before = self._catalog.history(found.name)
            if before is not None and not before.watched:
                self.changes.done(found)
                return
            if before is None or before.current.digest is None:
                outline = await self._threads.outline(source)
                if self._catalog.history(found.name) is not before:
                    return  # changed by a call: the next look tells what is to be done
                if before is None or before.current.outline != outline:
                    is_known = before is not None
                    self._catalog.register(found.name, outline, load_inplace=is_known, watched=True)
            else:
                loaded = await self._threads.whole(source)
                if self._catalog.history(found.name) is not before:
                    return
                outline = loaded.facts.outline
                self._catalog.publish(
                    found.name, loaded, load_inplace=True, pinned=before.pinned, watched=True
                )
            is_fresh = time.time_ns() - found.touched < FRESH_NANOSECONDS
            read = AdapterDirectory(found.name, found.path, outline.stamp)
            self.changes.done(read, is_fresh=is_fresh)
            self.refused.pop(found.name, None)
        self._on_change()

    def _drop(self, name: str) -> None:
        history = self._catalog.history(name)
        self.changes.forget(name)
        self.refused.pop(name, None)
        if history is not None and history.watched:
            self._catalog.unload(name)
            self._on_change()

    def _refuse(self, name: str, error: TopworkError) -> None:
        if self.refused.get(name) != error.message:
            logger.warning("%s is not served: %s", name, error)
            self.refused[name] = error.message
