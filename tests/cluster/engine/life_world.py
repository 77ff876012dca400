"""A whole small cluster on one event loop: one real pool actor, real engines, fake ranks.

Everything between them goes over real sockets. Owns every look at what they keep to themselves.
"""

import asyncio
import gc
import logging
import threading
from typing import Any

from cluster.adapters.adapter import Adapter
from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.pins import Limits
from cluster.adapters.service.pool_actor import AdapterPoolActor, AdapterPoolConfig
from cluster.adapters.sharding import RankMemory
from cluster.engine.core import SupervisorConfig
from cluster.engine.engine import Engine, EngineConfig
from cluster.engine.lora_loader import LoadLimits
from cluster.errors import NotFound
from cluster.messages import SchedulerAddress, Status
from cluster.router.engine_client import EngineClient
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.kv_cache.radix_tree import Namespace
from cluster.scheduler.scheduler import Scheduler
from tests.cluster.adapters.tiny import LIMITS, MODEL
from tests.cluster.engine.life_ranks import PAGE_SIZE, TP, Handle, Launcher, turns
from tests.patience import PATIENCE, SOON

logger = logging.getLogger(__name__)

MAX_WAITING = 8  # sequences
READ_THREADS = 2
FOREVER = 1e6  # seconds: what ends here ends for a reason
REQUEST_TIMEOUT = 100.0  # seconds, of replica "0" alone


class Replica:
    """One engine, its ranks, and the router's connection to it."""

    def __init__(self, name: str, launcher: Launcher, pool: AdapterPoolActor) -> None:
        self.name = name
        self.launcher = launcher
        self.timeout = REQUEST_TIMEOUT if name == "0" else None
        scheduler = SchedulerConfig(
            base_digest="b",
            num_pages=0,
            page_size=PAGE_SIZE,
            max_model_len=40,
            num_slots=launcher.num_slots,
            max_running=6,
            max_waiting=MAX_WAITING,
            token_budget=16,
            max_chunk=8,
            slot_patience=4,
            drain_steps=3,
        )
        config = EngineConfig(
            replica=name,
            ranks=SupervisorConfig(
                scheduler=scheduler,
                start_timeout=FOREVER,
                step_timeout=FOREVER,
                least_step_timeout=FOREVER,
                recovery_timeout=FOREVER,
                restart_delay=0.01,
            ),
            request_timeout=self.timeout,
            loads=LoadLimits(fetch=FOREVER, load=FOREVER, retry=FOREVER),
        )
        self.engine = Engine(config, launcher, pool)
        self.client: EngineClient
        self.address: SchedulerAddress
        self.is_closed = False
        # By call under way, its adapter and the troubles before it.
        self.waiting: dict[object, tuple[str | None, int]] = {}

    async def start(self) -> None:
        """Bring it up, and the router's connection to it."""
        self.address = await self.engine.start("127.0.0.1")
        await self.connect()
        while not (await self.client.status()).ready:
            await turns(5)

    async def connect(self) -> None:
        """Open a new connection of the router."""
        self.client = await EngineClient.connect(self.address, lambda: None)

    async def close(self) -> None:
        """End it, and the router's connection with it."""
        self.is_closed = True
        self.launcher.num_troubles += 1
        await self.engine.close()
        await self.client.wait_closed()

    @property
    def scheduler(self) -> Scheduler | None:
        """What plans for the ranks; None while they are down."""
        return self.engine._supervisor.scheduler

    @property
    def is_up(self) -> bool:
        """Whether the ranks serve and no blow to them is still to be noticed."""
        launcher = self.launcher
        return self.scheduler is not None and launcher.num_launches == launcher.num_troubles + 1

    @property
    def is_reached(self) -> bool:
        """Whether no connection to a rank is being opened."""
        return all(rank.is_reached for rank in self.launcher.ranks)

    def begin_waiting(self, call: object, digest: str | None) -> int:
        """Return how many troubles cannot be counted as losses of a call that begins.

        One that is still to be noticed can be. And who waits for an adapter is ended together with
        those that have waited for it longer.
        """
        is_noticed = self.scheduler is None or self.is_up
        own = self.launcher.num_troubles - (not is_noticed)
        others = [before for adapter, before in self.waiting.values() if adapter == digest]
        self.waiting[call] = digest, own
        return min([own, *others])

    def has_accepted(self, request_id: str) -> bool:
        """Whether a request is among those that the scheduler will end."""
        streams = self.engine._dispatcher._streams.values()
        return any(stream.request.request_id == request_id for stream in streams)

    def has(self, digest: str) -> bool:
        """Whether a slot holds an adapter, or will."""
        scheduler = self.scheduler
        return scheduler is not None and any(s.adapter == digest for s in scheduler.stats().slots)

    def check(self) -> None:
        """Assert what holds at any moment."""
        assert self.launcher.bad_plans == []
        main = self.engine._main
        assert main is not None and not main.done(), f"the step loop of {self.name} has ended"
        if self.scheduler is not None:
            self.scheduler.check()

    async def check_rest(self, known: set[str], pinned: tuple[str, ...]) -> None:
        """Assert that nothing is held for anybody, once all requests have ended.

        `known` is all content that may be in slots and in the prefix cache.
        """
        status = await self._rest()
        stats = status.scheduler
        assert {slot.leases for slot in stats.slots} <= {0}, stats.slots
        assert stats.held_pages == 0
        assert stats.free_pages + stats.cached_pages == stats.total_pages
        assert stats.free_host_pages + stats.cached_host_pages == stats.total_host_pages
        dispatcher = self.engine._dispatcher
        assert dispatcher.num_streams == 0
        assert dispatcher._streams == dispatcher._by_router == {}, "a stream is kept"
        assert not self.engine._lora_loader._unloading, "an unload is not answered"
        held = {slot.adapter for slot in stats.slots}
        assert held <= known, f"slots hold what no name points at: {held - known}"
        assert {slot.adapter for slot in stats.slots if slot.pinned} == held & set(pinned)
        cached = _Adapters()
        assert self.scheduler is not None
        self.scheduler.contents(cached)
        assert cached.seen <= {*known, "base"}, "the prefix cache holds what no name points at"
        table = {slot.slot: slot.adapter for slot in status.scheduler.slots}
        for rank in self.launcher.ranks:
            for slot, digest in enumerate(rank.bank()):
                assert digest == table.get(slot), f"slot {slot} holds {digest}: {table}"

    async def _rest(self) -> Status:
        """Wait until nothing goes on any more."""
        async with asyncio.timeout(PATIENCE):
            while True:
                status = await self.client.status()
                is_loading = any(slot.loading for slot in status.scheduler.slots)
                num_tasks = len(self.engine._lora_loader._background)
                num_live = status.scheduler.num_running + status.scheduler.num_waiting
                is_busy = num_live or is_loading or num_tasks
                if status.ready and self.is_up and not is_busy:
                    return status


class _Adapters:
    """Hears of which adapters a prefix cache holds pages."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def stored(self, namespace: Namespace, *_: Any) -> None:
        self.seen.add(namespace.adapter)

    def removed(self, *_: Any) -> None:
        raise AssertionError("contents are only reported")

    def dropped(self, *_: Any) -> None:
        raise AssertionError("contents are only reported")


def make_pool(host_bytes: int, num_slots: int) -> tuple[AdapterCatalog, AdapterPoolActor]:
    """Return a pool and its actor, which connects to schedulers as in a cluster."""
    catalog = AdapterCatalog("tiny", Limits(host_bytes=host_bytes, num_slots=num_slots))
    memory = RankMemory(tp=TP, adapter_item_bytes=4, model_item_bytes=4)
    config = AdapterPoolConfig(
        model=MODEL,
        limits=LIMITS,
        memory=memory,
        silence=FOREVER,
        read_threads=READ_THREADS,
        load_gap=0,
    )
    return catalog, AdapterPoolActor(config, catalog, EngineClient.connect, Handle)


def is_known(catalog: AdapterCatalog, digest: str) -> bool:
    """Whether the pool has not forgotten content."""
    try:
        catalog.missing(digest)
    except NotFound:
        return False
    return True


async def check_pool_rest(catalog: AdapterCatalog, actor: AdapterPoolActor) -> None:
    """Assert that the pool holds nothing that no name points at, once all is quiet."""
    async with asyncio.timeout(PATIENCE):
        while tasks := tuple(actor._collector._tasks.values()):
            await asyncio.wait(tasks)
            await turns(1)
    meet = threading.Barrier(READ_THREADS).wait  # the threads have let go of what they read then
    await asyncio.gather(*(actor._threads.run(meet) for _ in range(READ_THREADS)))
    catalog.check()
    assert catalog.retired() == {}
    assert actor._unloads._draining == {}


async def check_memory(catalog: AdapterCatalog) -> None:
    """Assert that nothing but the host tier keeps shards, and nobody keeps adapters.

    A thread lets go of what it has returned a moment later, which is long on a busy machine.
    """
    try:
        async with asyncio.timeout(SOON):
            while _has_leftovers(catalog):
                await asyncio.sleep(0.05)
    except TimeoutError:
        kept = _alive(Adapter) or _alive(Handle)
        # Hypothesis tells of a replay that went another way, in place of what failed first.
        logger.error("%d are kept, by %s", len(kept), _keepers(kept))
        assert not _has_leftovers(catalog), "somebody keeps shards, or an adapter"


def _has_leftovers(catalog: AdapterCatalog) -> bool:
    """Whether an adapter is alive, or other shards than the host tier has now."""
    gc.collect()
    versions = (version for record in catalog.records() for version in record.versions)
    in_memory = {version.digest for version in versions if version.tier == "host"}
    return bool(_alive(Adapter)) or len(_alive(Handle)) != TP * len(in_memory)


def _alive(kind: type) -> list[object]:
    """Return the objects of a class that were made since `gc.freeze`."""
    return [one for one in gc.get_objects() if isinstance(one, kind)]


def _keepers(kept: list[object]) -> list[set[str]]:
    """Return the types of what refers to objects, of what refers to that, and so on."""
    found, last = [], kept
    seen = {id(kept), id(found)}
    for _ in range(6):
        seen |= {id(last), *map(id, last)}
        last = [one for one in gc.get_referrers(*last) if id(one) not in seen]
        found.append({getattr(one, "__qualname__", type(one).__qualname__) for one in last})
    return found


def reads(actor: AdapterPoolActor) -> int:
    """Return how many directories are being read for those who may share."""
    return len(actor._threads._under_way)
