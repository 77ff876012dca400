"""Frees what no name points at any more everywhere: slots, KV namespaces, host memory.

Works in the background, with one task for each content that the catalogue has retired. Running
requests end first; content that is loaded again meanwhile is let in again and stays.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.records import Freed, UnloadResult
from cluster.adapters.service.directory_watcher import DirectoryWatcher
from cluster.adapters.service.registry import SchedulerRegistry, UnloadTotals
from cluster.errors import Unavailable

logger = logging.getLogger("topwork.pool")

RETRY_SECONDS = 1.0
TASK = "adapter_unloads"


class AdapterGC:
    """Follows the retirements of the catalogue.

    `saved` waits until they are saved, and `on_failure` counts tasks that fail.
    """

    def __init__(
        self,
        catalog: AdapterCatalog,
        registry: SchedulerRegistry,
        saved: Callable[[], Awaitable[None]],
        on_failure: Callable[[str], None],
    ) -> None:
        self._catalog = catalog
        self._registry = registry
        self._saved = saved
        self._on_failure = on_failure
        self._is_closing = False
        self._brought_back: dict[str, int] = {}  # retirements of the process before
        self._waits_for_schedulers = False
        self._tasks: dict[str, asyncio.Task[Freed]] = {}
        self._allowed: set[str] = set()  # revived, and every replica knows it
        self._closed: set[str] = set()  # no request runs on it; one that comes now is late

    def update(self, *, force: bool = False) -> None:
        """Begin what has become due; `force` aborts running requests instead of waiting."""
        for digest, number in self._catalog.retired().items():
            is_early = self._waits_for_schedulers and self._brought_back.get(digest) == number
            if digest not in self._tasks and not is_early:
                task = asyncio.create_task(self._collect(digest, force))
                self._tasks[digest] = task
                task.add_done_callback(partial(self._end, digest))
        for digest in (*self._tasks, *self._brought_back):
            if self._catalog.retirement(digest) is not None:
                self._allowed.discard(digest)
            elif digest not in self._allowed:
                self._allowed.add(digest)
                self._registry.allow(digest)

    async def freed(self, digests: Iterable[str], *, force: bool) -> tuple[Freed, ...]:
        """Wait until these are gone, or are wanted again; the work goes on without the caller."""
        under_way = [digest for digest in digests if digest in self._tasks]
        self.update(force=force)
        tasks = [self._tasks[digest] for digest in digests if digest in self._tasks]
        if force:  # those that wait for running requests
            await asyncio.gather(*(self._unload(digest, force=True) for digest in under_way))
        return tuple([await asyncio.shield(task) for task in tasks])

    def take_over(self, delay: float) -> None:
        """Leave what the process before has retired for some seconds, in which schedulers attach.

        Who has not said by then that requests run on it is not asked.
        """
        self._brought_back = self._catalog.retired()
        self._waits_for_schedulers = True
        asyncio.get_running_loop().call_later(delay, self._begin)

    def revived(self) -> list[str]:
        """Return what the process before may have had unloaded, and what is wanted again."""
        retired = self._catalog.retired()
        return [digest for digest in self._brought_back if digest not in retired]

    async def close(self) -> None:
        """End all work."""
        self._is_closing = True
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def is_closed(self, digest: str) -> bool:
        """Tell whether content may not be loaded any more, though it is not forgotten yet."""
        return digest in self._closed and self._catalog.retirement(digest) is not None

    async def _collect(self, digest: str, force: bool) -> Freed:
        """Unload content everywhere, then once more, then forget it.

        A replica that has answered lets requests in again while others still wait. One that was
        resolved before may come late, and what it brings back must go too; after the first round
        nothing can be brought back.
        """
        with contextlib.suppress(Unavailable):  # unloads must end, saved or not
            await self._saved()
        total = UnloadTotals()
        num_bytes, is_forgotten = 0, False
        while not is_forgotten and (number := self._catalog.retirement(digest)) is not None:
            self._allowed.discard(digest)
            total.add(await self._unload(digest, force=force))
            if self._catalog.retirement(digest) != number:
                continue
            self._closed.add(digest)
            total.add(await self._unload(digest, force=force))
            self._closed.discard(digest)
            if self._catalog.retirement(digest) == number:
                num_bytes, is_forgotten = self._catalog.forget(digest), True
                self._brought_back.pop(digest, None)
        self._allowed.discard(digest)
        return Freed(
            digest=digest,
            forgotten=is_forgotten,
            pages=total.pages,
            slots=tuple(total.slots),
            host_bytes=num_bytes,
            lost_replicas=tuple(sorted(total.lost)),
        )

    def _end(self, digest: str, task: asyncio.Task[Freed]) -> None:
        del self._tasks[digest]
        if self._is_closing or task.cancelled():
            return
        if (error := task.exception()) is None:
            self.update()  # it may have been retired again since the task last looked
            return
        logger.error("adapter %s could not be unloaded", digest, exc_info=error)
        self._on_failure(TASK)
        asyncio.get_running_loop().call_later(RETRY_SECONDS, self._begin)

    def _begin(self) -> None:
        if not self._is_closing:
            self._waits_for_schedulers = False
            self.update()

    async def _unload(self, digest: str, *, force: bool) -> UnloadTotals:
        return await self._registry.unload(
            digest, lambda: self._catalog.retirement(digest) is not None, force=force
        )


class AdapterUnloads:
    """Names that are on their way out, so that a later call can hurry an earlier one.

    `on_change` is called when a name has left the catalogue.
    """

    def __init__(
        self,
        catalog: AdapterCatalog,
        watcher: DirectoryWatcher,
        collector: AdapterGC,
        on_change: Callable[[], None],
    ) -> None:
        self._catalog = catalog
        self._watcher = watcher
        self._collector = collector
        self._on_change = on_change
        self._draining: dict[str, tuple[str, ...]] = {}  # digests that go with a name

    async def unload(self, name: str, *, force: bool) -> UnloadResult:
        """Take a name out and wait; see `AdapterPoolActor.unload`.

        Raises:
            NotFound: if there is no such name.
        """
        if force and name not in self._catalog and name in self._draining:
            freed = await self._collector.freed(self._draining[name], force=True)
            return UnloadResult(name, (), freed, ())
        history = self._catalog.unload(name)
        self._watcher.dismiss(name)
        is_retired = {d: self._catalog.retirement(d) is not None for d in sorted(history.digests)}
        leaving = tuple(digest for digest, retired in is_retired.items() if retired)
        self._draining[name] = leaving
        try:
            self._on_change()
            freed = await self._collector.freed(leaving, force=force)
        finally:
            if self._draining.get(name) is leaving:
                del self._draining[name]
        return UnloadResult(
            name=name,
            versions=tuple(version.number for version in history.versions),
            freed=freed,
            shared=tuple(digest for digest, retired in is_retired.items() if not retired),
        )
