"""The adapters of one scheduler: loads in the background, unloads under way, pins.

Owns the answers that are still owed to the pool, what goes on beside the steps, and what each slot
holds on the ranks. Decides nothing: which adapter gets a slot, and when it is gone, is the
Scheduler's.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Protocol

from cluster.engine.dispatcher import Dispatcher
from cluster.engine.executor import Executor
from cluster.engine.failure import ExecutorFailed
from cluster.engine.metrics import EngineMetrics
from cluster.engine.server import RouterConnection
from cluster.errors import Conflict, TopworkError
from cluster.messages import Unloaded
from cluster.request import ErrorInfo
from cluster.scheduler.replay.recorder import AnyScheduler
from cluster.scheduler.stats import AdapterLoad, UnloadedAdapter

logger = logging.getLogger("topwork.scheduler")

STEPS_PER_LOAD = 3


class ShardSource(Protocol):
    """The adapter pool as the scheduler sees it."""

    async def shards(self, adapter: str) -> tuple[tuple[Any, ...], ...]:
        """Return for each part one handle per rank to shards that are ready to be fetched.

        Raises:
            TopworkError: if the adapter cannot be had, with the reason.
        """

    async def prefetch(self, adapter: str) -> None:
        """Make `shards` quick, because they will be wanted; raises as it does."""


class LoraLoader:
    """Serves one shell through all lives of its ranks; `wake` makes the step loop look again."""

    def __init__(
        self,
        pool: ShardSource,
        owners: Dispatcher,
        wake: Callable[[], None],
        measures: EngineMetrics,
    ) -> None:
        # Adapter and bytes in each slot, on the rank that holds most.
        self.held: dict[int, tuple[str, int]] = {}
        self._pool = pool
        self._owners = owners
        self._wake = wake
        self._measures = measures
        self._pinned: dict[str, int] = {}
        self._fetched: frozenset[str] = frozenset()  # of those at the front of the line
        self._queue: deque[AdapterLoad] = deque()  # loads that have not begun
        self._steps_since_load = STEPS_PER_LOAD
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
            asker.send(Unloaded(call_id, freed_pages=0, freed_slots=()))
            return
        self._unloading[adapter].append((asker, call_id))
        self._owners.deliver(scheduler.unload(adapter, force=force))
        self._wake()

    def allow(self, scheduler: AnyScheduler | None, adapter: str) -> None:
        """Let requests for an adapter in again whose unload is not complete."""
        if scheduler is not None:
            scheduler.allow(adapter)
            self._wake()

    def keep_pinned(self, scheduler: AnyScheduler | None, adapters: dict[str, int]) -> None:
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
        for adapter, num_bytes in self._pinned.items():
            try:
                scheduler.pin(adapter, num_bytes)
            except Conflict as error:
                logger.warning("adapter %s stays unpinned: %s", adapter, error)

    def settle(
        self, group: Executor, scheduler: AnyScheduler, *, begins_step: bool, is_stepping: bool
    ) -> None:
        """Do what the last decision asks for: start loads, answer unloads, look ahead.

        While the ranks step, loads begin some steps apart: in a burst of them all running streams
        would slow down together.
        """
        for gone in scheduler.take_unloaded():
            calls = self._unloading.pop(gone.digest, [])
            self._measures.unloaded(gone.freed_slots)
            clearing = self._spawn(self._clear(group, gone.freed_slots))
            clearing.add_done_callback(partial(_answer, gone, calls))
        self._queue += scheduler.take_loads()
        self._steps_since_load += begins_step
        while self._queue and (not is_stepping or self._steps_since_load >= STEPS_PER_LOAD):
            load = self._queue.popleft()
            self._spawn(self._clear(group, load.clears))
            self._spawn(self._load(group, scheduler, load))
            self._steps_since_load = 0
        upcoming = scheduler.upcoming()
        for adapter in upcoming:
            if adapter not in self._fetched:
                self._spawn(self._prefetch(adapter))
        self._fetched = frozenset(upcoming)

    def end(self) -> None:
        """Answer and drop everything: the ranks are lost, and what they held with them."""
        for calls in self._unloading.values():
            for asker, call_id in calls:
                asker.send(Unloaded(call_id, freed_pages=0, freed_slots=()))
        self._unloading.clear()
        for task in tuple(self._background):
            task.cancel()
        self.held.clear()
        self._queue.clear()
        self._fetched = frozenset()

    async def _load(self, group: Executor, scheduler: AnyScheduler, load: AdapterLoad) -> None:
        """Bring one adapter into a slot of every rank; steps go on meanwhile."""
        began = self._measures.load_begins(load.slot, load.adapter, load.clears)
        try:
            parts = await self._pool.shards(load.adapter)
            held = await group.load_adapter(load.slot, load.adapter, parts)
        except TopworkError as error:
            self._measures.load_fails(load.slot)
            self._owners.deliver(scheduler.adapter_failed(load.adapter, info_of(error)))
            # Some ranks may have been able to load it, others hold what was there before.
            left = (load.adapter, load.replaces)
            await self._clear(group, [(load.slot, one) for one in left if one is not None])
        except ExecutorFailed:
            return  # the step loop learns it from the closed connection
        else:
            self.held[load.slot] = load.adapter, max(held)
            self._measures.load_ends(began)
            scheduler.adapter_ready(load.adapter)
        self._wake()

    async def _prefetch(self, adapter: str) -> None:
        with contextlib.suppress(TopworkError):  # the load will meet it again, and tell
            await self._pool.prefetch(adapter)

    def _clear(
        self, group: Executor, places: Iterable[tuple[int, str]]
    ) -> Coroutine[Any, Any, None]:
        """Free slots before anything else is loaded into them; await it to know that they are."""
        places = tuple(places)
        for slot, adapter in places:
            if self.held.get(slot, ("", 0))[0] == adapter:
                del self.held[slot]
        return _until_clear(group.clear_slots(places))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _answer(
    gone: UnloadedAdapter, calls: list[tuple[RouterConnection, int]], _: asyncio.Task[None]
) -> None:
    """Say what has been freed: the slots are empty by now, or their ranks are dead."""
    slots = tuple(slot for slot, _ in gone.freed_slots)
    for asker, call_id in calls:
        asker.send(Unloaded(call_id, gone.freed_pages, slots))


async def _until_clear(clearing: Awaitable[None]) -> None:
    with contextlib.suppress(ExecutorFailed):  # dead ranks hold no memory
        await clearing


def info_of(error: TopworkError) -> ErrorInfo:
    """Return an error as it travels."""
    return ErrorInfo(
        type(error).__name__, error.message, error.param, error.code, error.retry_after
    )
