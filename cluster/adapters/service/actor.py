"""The adapter pool as an actor: reads adapter files in threads, keeps the catalogue on its loop.

What a name means and which adapters stay in host memory is decided by AdapterCatalog.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.host_cache import Shards
from cluster.adapters.peft.checks import AdapterLimits
from cluster.adapters.peft.files import resolve_roots
from cluster.adapters.peft.reader import AdapterReader
from cluster.adapters.peft.strict_json import shown
from cluster.adapters.records import AdapterRecord, ResolvedAdapter, Source, UnloadResult
from cluster.adapters.service.configured import ConfiguredAdapters
from cluster.adapters.service.directory_watcher import DirectoryWatcher, NameLocks
from cluster.adapters.service.garbage_collector import AdapterGC
from cluster.adapters.service.metrics import CountDesk
from cluster.adapters.service.rate_limiter import RateLimiter
from cluster.adapters.service.read_threads import ReadThreads
from cluster.adapters.service.registry import Registry
from cluster.adapters.service.scheduler_links import Connect, SchedulerLinks
from cluster.adapters.service.shard_builder import ShardBuilder
from cluster.adapters.service.store import AdapterStore
from cluster.adapters.service.unloads import AdapterUnloads
from cluster.adapters.shards import RankMemory
from cluster.errors import NotFound
from cluster.weighted_adapters import parts_of
from worker.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPoolConfig:
    """What the shell needs beyond the pool's own rules; times in seconds."""

    model: ModelConfig
    limits: AdapterLimits
    memory: RankMemory
    adapter_dirs: tuple[str, ...] = ()  # every sub-directory is an adapter
    adapter_roots: tuple[str, ...] = ()  # where `load` may read; (): anywhere
    poll_interval: float = 2.0  # between looks at adapter_dirs
    silence: float = 10.0  # until a scheduler without a sign of life is given up
    read_threads: int = 8
    load_gap: float = 0.1  # between loads by call, while sequences run


class AdapterPoolActor(Registry):
    """One pool for all routers and schedulers of a cluster, which meet here.

    `connect` opens a line to a scheduler; `put` makes a shard fetchable and returns its handle.
    """

    def __init__(
        self,
        config: AdapterPoolConfig,
        pool: AdapterCatalog,
        connect: Connect,
        put: Callable[[Any], Any] = ray.put,
    ) -> None:
        self._config = config
        self._pool = pool
        self._roots = resolve_roots(config.adapter_roots)
        reader = AdapterReader(config.model, config.limits)
        self._reads = ReadThreads(reader, ShardBuilder(config.memory, put), config.read_threads)
        self._shelf = AdapterStore(pool, self._reads)
        self._locks = NameLocks()
        super().__init__(SchedulerLinks(connect, config.silence), CountDesk(pool, self._reads))
        self._pace = RateLimiter(self._links.is_busy, config.load_gap)
        self._reclaimer = AdapterGC(pool, self._links)
        self._watch = DirectoryWatcher(
            config.adapter_dirs,
            resolve_roots((*config.adapter_dirs, *config.adapter_roots)),
            pool,
            self._reads,
            self._locks,
            self._changed,
        )
        self._list = ConfiguredAdapters(
            pool, self._reads, self._locks, self._watch, config.poll_interval
        )
        self._unloads = AdapterUnloads(pool, self._watch, self._reclaimer, self._tell_pins)

    @ray.method
    async def start(self, adapters: dict[str, str]) -> dict[str, str]:
        """Register the operator's adapters, directory by name, and what adapter_dirs hold.

        Only what tells whether they fit is read. Returns why a sub-directory is no adapter, by
        name.

        Raises:
            TopworkError: if one of `adapters` fails a check; the message names it.
        """
        await self._list.begin(adapters)
        return self._list.refused

    @ray.method
    async def follow(
        self, adapters: dict[str, str], adapter_dirs: tuple[str, ...]
    ) -> dict[str, str]:
        """Serve what the configuration says now, which may be new, and what calls have loaded.

        Running requests end on what they began with. Returns why an adapter is not served, by
        name.
        """
        self._watch.turn_to(
            adapter_dirs, resolve_roots((*adapter_dirs, *self._config.adapter_roots))
        )
        await self._list.follow(adapters)
        self._changed()
        return self._list.refused

    @ray.method
    async def close(self) -> None:
        """End all work in the background."""
        await self._list.close()
        await self._reclaimer.close()
        self._links.close()
        self._reads.close()

    @ray.method
    async def load(self, name: str, path: str, load_inplace: bool, pinned: bool) -> AdapterRecord:
        """Read an adapter directory whole and publish it under a name.

        Raises:
            InvalidRequest: if the name cannot be taken, or no more can be pinned.
            NotFound: if there is no such directory.
            InvalidAdapter: if the directory fails a check or lies outside of adapter_roots.
        """
        async with self._locks.of(name):  # the last call to come is the last to publish
            self._pool.check_name(name, load_inplace=load_inplace)
            await self._pace.take()
            loaded = await self._reads.whole(Source(str(Path(path).absolute()), self._roots))
            record = self._pool.publish(name, loaded, load_inplace=load_inplace, pinned=pinned)
        self._changed()
        return record

    @ray.method
    async def unload(self, name: str, force: bool) -> UnloadResult:
        """Take a name out of the catalogue; wait until what only it stood for is gone everywhere.

        Requests that run end first, or are aborted by `force`, which may also come while an
        earlier call still waits.

        Raises:
            NotFound: if there is no such name.
        """
        return await self._unloads.unload(name, force=force)

    @ray.method
    async def rollback(self, name: str, version: int | None) -> AdapterRecord:
        """Give all requests to an earlier version; asked for none, to the one before.

        Raises:
            NotFound: if there is no such name.
            Conflict: if that version is not kept, or its content cannot be had any more.
        """
        async with self._locks.of(name):
            number = self._pool.rollback_target(name, version).number
            loaded = await self._shelf.obtain(
                name, lambda: (self._pool.rollback_target(name, number),)
            )
            record = self._pool.rollback(name, number, loaded)
        self._watch.dismiss(name)
        self._changed()
        return record

    @ray.method
    async def split(self, name: str, shares: dict[int, int]) -> AdapterRecord:
        """Give shares of the requests, in percent by version, to kept versions.

        Raises:
            NotFound: if there is no such name.
            InvalidRequest: if the shares do not sum to 100.
            Conflict: if a version is not kept, or its content cannot be had any more.
        """
        async with self._locks.of(name):
            loaded = await self._shelf.obtain(name, lambda: self._pool.split_targets(name, shares))
            record = self._pool.split(name, shares, loaded)
        self._watch.dismiss(name)
        self._changed()
        return record

    @ray.method
    async def resolve(self, name: str, request_id: str) -> ResolvedAdapter:
        """Return what one request gets for a name; read its tensors if nobody has yet.

        Raises:
            NotFound: if there is no such name, or its directory is gone before its first use.
            InvalidAdapter: if its directory fails a check that needs the tensors.
        """
        while True:
            if name not in self._pool and self._watch.is_watching:
                await self._watch.find(name)
            source = self._pool.unread(name, request_id)
            if source is None:
                return self._pool.resolve(name, request_id)
            self._pool.settle(await self._reads.shared(source))
            self._changed()

    @ray.method
    async def record(self, name: str) -> AdapterRecord:
        """Return what is known of a name.

        Raises:
            NotFound: if there is no such name.
        """
        if name not in self._pool and self._watch.is_watching:
            await self._watch.find(name)
        return self._pool.record(name)

    @ray.method
    async def records(self) -> tuple[AdapterRecord, ...]:
        """Return the whole catalogue by name."""
        return self._pool.records()

    @ray.method
    async def shards(self, adapter: str) -> tuple[Shards, ...]:
        """Return the shards of each part of an adapter, in shared memory: a handle for each rank.

        Raises:
            NotFound: if a part has been unloaded, or its directory is gone.
            InvalidAdapter: if it must be read from disk again and is not what it was.
            Unavailable: if there is no room for the shards.
        """
        return await self._obtain(adapter)

    @ray.method
    async def prefetch(self, adapter: str) -> None:
        """Bring an adapter to host memory, because it will be wanted; raises as `shards` does."""
        await self._obtain(adapter)

    async def _obtain(self, adapter: str) -> tuple[Shards, ...]:
        digests = [digest for digest, _ in parts_of(adapter)]
        for digest in digests:
            if self._reclaimer.is_closed(digest):
                raise NotFound(f"The lora adapter of digest {shown(digest)} has been unloaded.")
        return tuple([await self._shelf.take(digest) for digest in digests])

    def _changed(self) -> None:
        """Follow a change of the catalogue."""
        self._reclaimer.update()
        self._tell_pins()

    def _tell_pins(self) -> None:
        self._links.keep_pinned({facts.digest: facts.device_bytes for facts in self._pool.pinned()})
