"""Makes content that no version points at go everywhere: slots, KV namespaces, host memory.

Owns the work in the background, one task for each content. Running requests end first; content
that is loaded again meanwhile is let in again and stays. What is retired is the pool's to say.
"""

import asyncio
from collections.abc import Iterable
from functools import partial

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.records import Freed
from cluster.adapters.service.scheduler_links import Gone, SchedulerLinks


class AdapterGC:
    """Follows the pool's retirements."""

    def __init__(self, pool: AdapterCatalog, links: SchedulerLinks) -> None:
        self._pool = pool
        self._links = links
        self._tasks: dict[str, asyncio.Task[Freed]] = {}
        self._allowed: set[str] = set()  # revived, and every replica has been told
        self._closed: set[str] = set()  # nobody runs on it; who comes now has come late

    def update(self, *, force: bool = False) -> None:
        """Begin what has become due; `force` aborts running requests instead of waiting."""
        for digest in self._pool.retired():
            if digest not in self._tasks:
                task = asyncio.create_task(self._reclaim(digest, force))
                self._tasks[digest] = task
                task.add_done_callback(partial(self._end, digest))
        for digest in self._tasks:
            if self._pool.retirement(digest) is not None:
                self._allowed.discard(digest)
            elif digest not in self._allowed:
                self._allowed.add(digest)
                self._links.allow(digest)

    async def freed(self, digests: Iterable[str], *, force: bool) -> tuple[Freed, ...]:
        """Wait until these are gone, or are wanted again; the work goes on without the caller."""
        under_way = [digest for digest in digests if digest in self._tasks]
        self.update(force=force)
        tasks = [self._tasks[digest] for digest in digests if digest in self._tasks]
        if force:  # those that have been waiting patiently
            await asyncio.gather(*(self._unload(digest, force=True) for digest in under_way))
        return tuple([await asyncio.shield(task) for task in tasks])

    async def close(self) -> None:
        """End all work."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def is_closed(self, digest: str) -> bool:
        """Tell whether nobody may load content any more, though it is not forgotten yet."""
        return digest in self._closed and self._pool.retirement(digest) is not None

    async def _reclaim(self, digest: str, force: bool) -> Freed:
        """Unload content everywhere, then once more, then forget it.

        A replica that has answered lets requests in again while others still wait. One that was
        resolved before may come late, and what it brings back must go too; after the first round
        nothing can be brought back.
        """
        total = Gone()
        num_bytes, is_forgotten = 0, False
        while not is_forgotten and (number := self._pool.retirement(digest)) is not None:
            self._allowed.discard(digest)
            total.add(await self._unload(digest, force=force))
            if self._pool.retirement(digest) != number:
                continue
            self._closed.add(digest)
            total.add(await self._unload(digest, force=force))
            self._closed.discard(digest)
            if self._pool.retirement(digest) == number:
                num_bytes, is_forgotten = self._pool.forget(digest), True
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
        if not task.cancelled() and task.exception() is None:
            self.update()  # it may have been retired again since the task last looked

    async def _unload(self, digest: str, *, force: bool) -> Gone:
        return await self._links.unload(
            digest, lambda: self._pool.retirement(digest) is not None, force=force
        )
