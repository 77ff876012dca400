"""The adapters of one scheduler: loads in the background, unloads under way, pins.

Owns the answers that are still owed to the pool and what goes on beside the steps. Decides nothing:
which adapter gets a slot, and when it is gone, is the Scheduler's.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from cluster.composition import parts_of
from cluster.errors import Conflict, TopworkError
from cluster.request import ErrorInfo
from cluster.scheduling.recorder import AnyScheduler
from cluster.shells.owners import Owners
from cluster.shells.rank_group import GroupFailed, RankGroup
from cluster.shells.router_door import RouterConnection
from cluster.wire import Unloaded

logger = logging.getLogger("topwork.scheduler")


class ShardSource(Protocol):
    """The adapter pool as the scheduler sees it."""

    async def shards(self, digest: str, tp: int) -> tuple[Any, ...]:
        """Return one handle per rank to shards that are ready to be fetched.

        Raises:
            TopworkError: if the adapter cannot be had, with the reason.
        """


class AdapterDesk:
    """Serves one shell through all lives of its ranks; `wake` makes the step loop look again."""

    def __init__(
        self, pool: ShardSource, tp: int, owners: Owners, wake: Callable[[], None]
    ) -> None:
        self._pool = pool
        self._tp = tp
        self._owners = owners
        self._wake = wake
        self._pinned: tuple[str, ...] = ()
        self._unloading: dict[str, list[tuple[RouterConnection, int]]] = defaultdict(list)
        self._background: set[asyncio.Task[None]] = set()

    def unload(
        self,
        scheduler: AnyScheduler | None,
        asker: RouterConnection,
        call_id: int,
        adapter: str,
        force: bool,
    ) -> None:
        """Forget an adapter; the answer goes out when nothing of it is left."""
        if scheduler is None:
            asker.send(Unloaded(call_id, freed_pages=0, freed_slot=None))
            return
        self._unloading[adapter].append((asker, call_id))
        self._owners.deliver(scheduler.unload(adapter, force=force))
        self._wake()

    def allow(self, scheduler: AnyScheduler | None, adapter: str) -> None:
        """Let requests for an adapter in again whose unload is not complete."""
        if scheduler is not None:
            scheduler.allow(adapter)
            self._wake()

    def keep_pinned(self, scheduler: AnyScheduler | None, adapters: tuple[str, ...]) -> None:
        """Keep exactly these adapters in their slots, in all lives of the ranks."""
        before, self._pinned = self._pinned, adapters
        if scheduler is None:
            return
        for adapter in before:
            if adapter not in adapters:
                scheduler.unpin(adapter)
        self.begin(scheduler)

    def begin(self, scheduler: AnyScheduler) -> None:
        """Tell a scheduler what is pinned; what does not fit is served unpinned."""
        for adapter in self._pinned:
            try:
                scheduler.pin(adapter)
            except Conflict as error:
                logger.warning("adapter %s stays unpinned: %s", adapter, error)

    def settle(self, group: RankGroup, scheduler: AnyScheduler) -> None:
        """Do what the last decision asks for: start loads, answer unloads."""
        for load in scheduler.take_loads():
            self._spawn(self._load(group, scheduler, load.digest, load.slot))
        for gone in scheduler.take_unloaded():
            for asker, call_id in self._unloading.pop(gone.digest, []):
                asker.send(Unloaded(call_id, gone.freed_pages, gone.freed_slot))
            if gone.freed_slot is not None:
                self._spawn(self._clear(group, gone.freed_slot, gone.digest))

    def end(self) -> None:
        """Answer and drop everything: the ranks are lost, and what they held with them."""
        for calls in self._unloading.values():
            for asker, call_id in calls:
                asker.send(Unloaded(call_id, freed_pages=0, freed_slot=None))
        self._unloading.clear()
        for task in tuple(self._background):
            task.cancel()

    async def _load(
        self, group: RankGroup, scheduler: AnyScheduler, digest: str, slot: int
    ) -> None:
        """Bring one adapter into a slot of every rank; steps go on meanwhile."""
        try:
            parts = [await self._pool.shards(part, self._tp) for part, _ in parts_of(digest)]
            await group.load_adapter(slot, digest, tuple(parts))
        except TopworkError as error:
            self._owners.deliver(scheduler.adapter_failed(digest, info_of(error)))
            await self._clear(group, slot, digest)  # of the ranks that could load it
        except GroupFailed:
            return  # the step loop learns it from the closed connection
        else:
            scheduler.adapter_ready(digest)
        self._wake()

    async def _clear(self, group: RankGroup, slot: int, digest: str) -> None:
        with contextlib.suppress(GroupFailed):  # dead ranks hold no memory
            await group.clear_slot(slot, digest)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def info_of(error: TopworkError) -> ErrorInfo:
    """Return an error as it travels."""
    return ErrorInfo(
        type(error).__name__, error.message, error.param, error.code, error.retry_after
    )
