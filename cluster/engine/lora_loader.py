"""Carries out what the scheduler decides of adapters, beside the steps: loads, clears, unloads.

Owns the answers that are still owed to the pool, and what each slot holds on the ranks. Which
adapter gets a slot, which is pinned there and when one is gone, its slot table says; of pins and
unloads the loader keeps what the pool wants, because that must outlive a restart of the ranks.

A load always ends: in time, or with an error for the requests that wait for the adapter, and for
them alone. What may come back, such as a pool that restarts, is tried again for a while.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from cluster.engine.dispatcher import Dispatcher
from cluster.engine.executor import Executor, ExecutorFailed
from cluster.engine.metrics import EngineMetrics
from cluster.engine.server import RouterConnection
from cluster.errors import Conflict, Internal, TopworkError, Unavailable, error_info
from cluster.messages import Unloaded
from cluster.scheduler.scheduler import Scheduler
from cluster.scheduler.stats import AdapterLoad, UnloadedAdapter

logger = logging.getLogger("topwork.scheduler")

STEPS_PER_LOAD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLimits:
    """How long a load may take; in seconds."""

    fetch: float = 30.0  # until the pool has shards that can be fetched
    load: float = 30.0  # until all ranks have fetched and acknowledged them
    retry: float = 60.0  # from the first try until what may come back is tried no more
    retry_delay: float = 0.5


class ShardSource(Protocol):
    """The adapter pool as the scheduler sees it."""

    async def shards(self, adapter: str) -> tuple[tuple[Any, ...], ...]:
        """Return for each part one handle per rank to shards that are ready to be fetched.

        Raises:
            TopworkError: if the adapter cannot be had, with the reason.
        """

    async def prefetch(self, adapter: str) -> None:
        """Make `shards` quick, because they will be wanted; raises as it does."""


@dataclass(slots=True)
class _PendingUnload:
    """Calls to unload one adapter that are not answered."""

    force: bool = False
    is_deferred: bool = False  # until the scheduler knows all streams of the adapter
    calls: list[tuple[RouterConnection, int]] = field(default_factory=list)

    def answer(self, freed_pages: int, freed_slots: tuple[int, ...]) -> None:
        """Say what has been freed."""
        for connection, call_id in self.calls:
            connection.send(Unloaded(call_id, freed_pages, freed_slots))


class LoraLoader:
    """Serves one engine, also when its ranks restart; `wake` makes the step loop look again."""

    def __init__(
        self,
        pool: ShardSource,
        dispatcher: Dispatcher,
        is_held: Callable[[str], bool],
        wake: Callable[[], None],
        metrics: EngineMetrics,
        limits: LoadLimits = LoadLimits(),
    ) -> None:
        # Adapter and bytes in each slot, on the rank that holds most.
        self.held: dict[int, tuple[str, int]] = {}
        self.loading: dict[str, None] = {}  # adapters that ranks have been asked to load
        self._pool = pool
        self._dispatcher = dispatcher
        self._is_held = is_held  # whether calls of an adapter wait for a grammar
        self._wake = wake
        self._metrics = metrics
        self._limits = limits
        self._wanted_pins: dict[str, int] = {}  # bytes that each claims on a rank
        self._prefetched: frozenset[str] = frozenset()  # of those that wait for a slot
        self._queue: deque[AdapterLoad] = deque()  # loads that have not begun
        self._steps_since_load = STEPS_PER_LOAD
        self._unloading: defaultdict[str, _PendingUnload] = defaultdict(_PendingUnload)
        self._background: set[asyncio.Task[None]] = set()

    def unload(
        self,
        scheduler: Scheduler | None,
        connection: RouterConnection,
        call_id: int,
        adapter: str,
        force: bool,
    ) -> None:
        """Forget an adapter; the answer goes out when nothing of it is left."""
        if scheduler is None and not self._dispatcher.is_parking:
            connection.send(Unloaded(call_id, freed_pages=0, freed_slots=()))
            return
        pending = self._unloading[adapter]
        pending.calls.append((connection, call_id))
        pending.force |= force
        if scheduler is not None:
            self._begin_unload(scheduler, adapter, pending)
            self._wake()

    def allow(self, scheduler: Scheduler | None, adapter: str) -> None:
        """Let requests for an adapter in again whose unload is not complete."""
        pending = self._unloading.get(adapter)
        if pending is not None and (scheduler is None or pending.is_deferred):
            self._unloading.pop(adapter).answer(0, ())
        if scheduler is not None:
            scheduler.allow(adapter)
            self._wake()

    def repeat_unloads(self, scheduler: Scheduler) -> None:
        """Begin the unloads again that were not complete when the ranks were lost."""
        for adapter, pending in tuple(self._unloading.items()):
            self._begin_unload(scheduler, adapter, pending)

    def answer_unloads(self) -> None:
        """Answer all unloads: no ranks hold anything, and none are expected back."""
        unloading = tuple(self._unloading.values())
        self._unloading.clear()
        for pending in unloading:
            pending.answer(0, ())

    def keep_pinned(self, scheduler: Scheduler | None, adapters: dict[str, int]) -> None:
        """Keep exactly these adapters in their slots, also when the ranks have restarted."""
        before, self._wanted_pins = self._wanted_pins, adapters
        if scheduler is None:
            return
        for adapter in before:
            if adapter not in adapters:
                scheduler.unpin(adapter)
        self.restore_pins(scheduler)

    def restore_pins(self, scheduler: Scheduler) -> None:
        """Pin what is to be pinned; what does not fit is served unpinned."""
        for adapter, num_bytes in self._wanted_pins.items():
            try:
                scheduler.pin(adapter, num_bytes)
            except Conflict as error:
                logger.warning("adapter %s stays unpinned: %s", adapter, error)

    def run_pending(
        self, executor: Executor, scheduler: Scheduler, *, begins_step: bool, is_stepping: bool
    ) -> None:
        """Begin what the last decision asks for: loads, clears and answers of unloads, prefetches.

        While the ranks step, loads begin some steps apart: in a burst of them all running streams
        would slow down together. Unloads that were deferred begin for the next decision.
        """
        for unloaded in scheduler.take_unloaded():
            pending = self._unloading.pop(unloaded.digest, _PendingUnload())
            self._metrics.unloaded(unloaded.freed_slots)
            clearing = self._spawn(self._clear(executor, unloaded.freed_slots))
            clearing.add_done_callback(partial(_answer, unloaded, pending))
        self._queue += scheduler.take_loads()
        self._steps_since_load += begins_step
        while self._queue and (not is_stepping or self._steps_since_load >= STEPS_PER_LOAD):
            load = self._queue.popleft()
            self._spawn(self._clear(executor, load.clears))
            self._spawn(self._load(executor, scheduler, load))
            self._steps_since_load = 0
        upcoming = scheduler.upcoming()
        for adapter in upcoming:
            if adapter not in self._prefetched:
                self._spawn(self._prefetch(adapter))
        self._prefetched = frozenset(upcoming)
        for unloading, deferred in tuple(self._unloading.items()):
            if deferred.is_deferred and self._begin_unload(scheduler, unloading, deferred):
                self._wake()

    def reset(self) -> None:
        """Drop all but pins and unloads: the ranks are lost, and what they held with them."""
        for task in tuple(self._background):
            task.cancel()
        self.held.clear()
        self.loading.clear()
        self._queue.clear()
        self._prefetched = frozenset()

    def _begin_unload(self, scheduler: Scheduler, adapter: str, pending: _PendingUnload) -> bool:
        """Have an adapter unloaded; False if that must wait for streams that are parked or held.

        The scheduler does not know of the streams behind a suspect that runs alone, nor of calls
        whose grammar is being compiled: it would be done at once, and they would go on with an
        adapter that the pool has forgotten.
        """
        if pending.force:
            self._dispatcher.end_parked(adapter)
        pending.is_deferred = not pending.force and (
            self._dispatcher.has_parked(adapter) or self._is_held(adapter)
        )
        if pending.is_deferred:
            return False
        self._dispatcher.deliver(scheduler.unload(adapter, force=pending.force))
        return True

    async def _load(self, executor: Executor, scheduler: Scheduler, load: AdapterLoad) -> None:
        """Bring one adapter into a slot of every rank; steps go on meanwhile."""
        began = self._metrics.load_begins(load.slot, load.adapter, load.clears)
        try:
            held = await self._fetch_and_load(executor, load)
        except ExecutorFailed:
            return  # the step loop learns it from the executor
        except TopworkError as error:
            await self._load_failed(executor, scheduler, load, error)
        except Exception as error:  # a bug somewhere below: it must not hold the slot for ever
            logger.exception("adapter %s could not be loaded", load.adapter)
            failure = Internal(f"the adapter could not be loaded: {type(error).__name__}: {error}")
            await self._load_failed(executor, scheduler, load, failure)
        else:
            self.loading.pop(load.adapter, None)
            self.held[load.slot] = load.adapter, max(held)
            self._metrics.load_ends(load.adapter, began)
            scheduler.adapter_ready(load.adapter)
        self._wake()

    async def _fetch_and_load(self, executor: Executor, load: AdapterLoad) -> tuple[int, ...]:
        """Return the bytes that the adapter takes on each rank, once it is there.

        Raises:
            TopworkError: if it cannot be had or loaded, or not in time.
            ExecutorFailed: if the ranks are lost.
        """
        limits, loop = self._limits, asyncio.get_running_loop()
        last_try = loop.time() + limits.retry
        while True:
            try:
                async with _limit(limits.fetch, f"the pool has not read {load.adapter}"):
                    parts = await self._pool.shards(load.adapter)
                self.loading[load.adapter] = None
                async with _limit(limits.load, f"the ranks have not loaded {load.adapter}"):
                    return await executor.load_adapter(load.slot, load.adapter, parts)
            except Unavailable as error:
                if loop.time() > last_try:
                    raise
                logger.warning("adapter %s is loaded anew: %s", load.adapter, error)
                await asyncio.sleep(limits.retry_delay)

    async def _load_failed(
        self, executor: Executor, scheduler: Scheduler, load: AdapterLoad, error: TopworkError
    ) -> None:
        self.loading.pop(load.adapter, None)
        self._metrics.load_fails(load.slot)
        self._dispatcher.deliver(scheduler.adapter_failed(load.adapter, error_info(error)))
        # Some ranks may have been able to load it, others hold what was there before.
        left = (load.adapter, load.replaces)
        await self._clear(executor, [(load.slot, one) for one in left if one is not None])

    async def _prefetch(self, adapter: str) -> None:
        with contextlib.suppress(TopworkError):  # the load will meet it again, and report it
            await self._pool.prefetch(adapter)

    def _clear(
        self, executor: Executor, slots: Iterable[tuple[int, str]]
    ) -> Coroutine[Any, Any, None]:
        """Free slots before anything else is loaded into them; await it to know that they are."""
        slots = tuple(slots)
        for slot, adapter in slots:
            if self.held.get(slot, ("", 0))[0] == adapter:
                del self.held[slot]
        return _until_clear(executor.clear_slots(slots))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


@contextlib.asynccontextmanager
async def _limit(seconds: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Unavailable(f"{what} in {seconds:g} s", retry_after=1) from None


def _answer(unloaded: UnloadedAdapter, pending: _PendingUnload, _: asyncio.Task[None]) -> None:
    """Say what has been freed: the slots are empty by now, or their ranks are dead."""
    pending.answer(unloaded.freed_pages, tuple(slot for slot, _ in unloaded.freed_slots))


async def _until_clear(clearing: Awaitable[None]) -> None:
    with contextlib.suppress(ExecutorFailed):  # the step loop learns it from the executor
        await clearing
