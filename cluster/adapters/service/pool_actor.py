"""The adapter pool as an actor, which is also the registry of the cluster.

Reads adapter files in threads and keeps the catalogue on its loop; what a name means and which
adapters stay in host memory is decided by AdapterCatalog. Schedulers attach here, routers find them
here and report what they count, for it is the one process that all of them know. What a call has
changed is saved before the call is answered.
"""

import secrets
import time
from collections.abc import Callable
from typing import Any

import ray

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.host_cache import Shards
from cluster.adapters.peft.files import resolve_roots
from cluster.adapters.peft.reader import AdapterReader
from cluster.adapters.peft.strict_json import shown
from cluster.adapters.records import AdapterRecord, ResolvedAdapter, UnloadResult
from cluster.adapters.saved_state import name_entry
from cluster.adapters.service import configured, garbage_collector, pool_state, usage_file
from cluster.adapters.service.calls.cluster_registry import ClusterRegistry
from cluster.adapters.service.calls.in_flight import InFlightCalls, pool_call, pool_query
from cluster.adapters.service.calls.loading import LoadingCalls
from cluster.adapters.service.calls.versions import VersionCalls
from cluster.adapters.service.configured import ConfiguredAdapters
from cluster.adapters.service.directory_watcher import DirectoryWatcher, NameLocks
from cluster.adapters.service.garbage_collector import AdapterGC, AdapterUnloads
from cluster.adapters.service.pool_config import AdapterPoolConfig
from cluster.adapters.service.pool_state import PoolState
from cluster.adapters.service.read_threads import RateLimiter, ReadThreads
from cluster.adapters.service.registry import Connect, SchedulerRegistry
from cluster.adapters.service.store import AdapterStore, ShardBuilder
from cluster.adapters.service.usage_file import UsageFile
from cluster.adapters.sources import staged
from cluster.adapters.sources.allow_list import AllowList
from cluster.adapters.sources.fetcher import Fetcher
from cluster.adapters.sources.staged import StagedAdapters
from cluster.adapters.sources.uploads import Uploads
from cluster.errors import NotFound, TopworkError
from cluster.metrics_hub import MetricsHub, PoolCounts
from cluster.request import parts_of
from cluster.tenancy.budget_ledger import BudgetLedger

__all__ = ["AdapterPoolActor", "AdapterPoolConfig"]

STAGED_AT_ONCE = 2  # largest adapters that the disk holds while they arrive


class AdapterPoolActor(LoadingCalls, VersionCalls, ClusterRegistry):
    """One pool for all routers and schedulers of a cluster.

    `connect` opens a connection to a scheduler; `put` makes a shard fetchable and returns its
    handle.
    """

    def __init__(
        self,
        config: AdapterPoolConfig,
        catalog: AdapterCatalog,
        connect: Connect,
        put: Callable[[Any], Any] = ray.put,
    ) -> None:
        self._config = config
        self._catalog = catalog
        self._roots = resolve_roots(config.adapter_roots)
        reader = AdapterReader(config.model, config.limits)
        catalog.set_layout(config.layout)
        builder = ShardBuilder(config.memory, put, config.layout)
        self._threads = ReadThreads(reader, builder.load, config.read_threads, config.read_bytes)
        self._store = AdapterStore(catalog, self._threads)
        self._locks = NameLocks()
        # Of background tasks.
        self._failures = dict.fromkeys(
            (
                configured.TASK,
                pool_state.TASK,
                garbage_collector.TASK,
                staged.TASK,
                usage_file.TASK,
            ),
            0,
        )
        self._registry = SchedulerRegistry(
            connect, config.silence, self._pinned, lambda: self._collector.revived()
        )
        self._num_sent_pin_changes = 0
        self._rate_limiter = RateLimiter(self._registry.is_busy, config.load_gap)
        self._collector = AdapterGC(
            catalog, self._registry, lambda: self._state.saved(), self._count_failure
        )
        self._watcher = DirectoryWatcher(
            config.adapter_dirs,
            resolve_roots((*config.adapter_dirs, *config.adapter_roots)),
            catalog,
            self._threads,
            self._locks,
            self._on_change,
        )
        self._configured = ConfiguredAdapters(
            catalog,
            self._threads,
            self._locks,
            self._watcher,
            config.poll_interval,
            self._count_failure,
        )
        self._staged = StagedAdapters(
            config.staging,
            catalog.uses,
            lambda: self._state.saved(),
            self._count_failure,
            STAGED_AT_ONCE * config.max_upload,
        )
        catalog.note_released(self._staged.release)
        self._uploads = Uploads(self._staged, config.max_upload, self._threads.run)
        self._fetcher = Fetcher(AllowList(config.sources), self._staged, config.max_upload)
        self._state = PoolState(
            config.state,
            config.server,
            catalog,
            self._store,
            self._staged,
            self._watcher,
            self._configured,
            self._count_failure,
        )
        self._calls = InFlightCalls(self._state.check_open)
        self._unloads = AdapterUnloads(catalog, self._watcher, self._collector, self._send_pins)
        self._usage = UsageFile(config.usage_file, _today, self._count_failure)
        self._ledger = BudgetLedger(secrets.token_hex(8))
        self._hub = MetricsHub(time.monotonic, catalog.__contains__, self._counts)

    @ray.method
    async def start(self, adapters: dict[str, str]) -> dict[str, str]:
        """Bring back what was saved, and do as `follow`, but end where an adapter cannot be served.

        Only what tells whether they fit is read. Returns why a sub-directory is no adapter, by
        name.

        Raises:
            TopworkError: if one of `adapters` fails a check, when the server starts; the message
                names it. Or if the saved state cannot be used.
        """
        is_restart = await self._open_state()
        if self._state.is_of_same_server:
            await self._configured.follow(adapters, is_restart=is_restart)
        else:
            await self._configured.start(adapters, is_restart=is_restart)
        self._on_change()
        await self._state.has_started()
        return self._configured.refused

    @ray.method
    async def follow(
        self, adapters: dict[str, str], adapter_dirs: tuple[str, ...]
    ) -> dict[str, str]:
        """Serve what the configuration says now, which may be new, and what calls have loaded.

        Running requests end on what they began with. Returns why an adapter is not served, by
        name.

        Raises:
            Unavailable: if the saved state cannot be used, or what has changed cannot be saved.
        """
        roots = resolve_roots((*adapter_dirs, *self._config.adapter_roots))
        self._watcher.watch(adapter_dirs, roots)
        is_restart = await self._open_state()
        await self._configured.follow(adapters, is_restart=is_restart)
        self._on_change()
        await self._state.has_started()
        return self._configured.refused

    @ray.method
    async def close(self) -> None:
        """Take no more calls, end those that run, and all work in the background."""
        self._state.end()
        await self._calls.end()
        await self._configured.close()
        await self._collector.close()
        await self._uploads.close()
        self._fetcher.close()
        self._registry.close()
        self._threads.close()
        await self._staged.close()
        await self._state.close()
        await self._usage.close()

    @ray.method
    @pool_call
    async def unload(self, name: str, force: bool) -> UnloadResult:
        """Take a name out of the catalogue; wait until what only it stood for is gone everywhere.

        Requests that run end first, or are aborted by `force`, which may also come while an
        earlier call still waits.

        Raises:
            NotFound: if there is no such name.
        """
        result = await self._unloads.unload(name, force=force)
        await self._state.saved()
        return result

    @ray.method
    @pool_query
    async def resolve(self, name: str, request_id: str) -> ResolvedAdapter:
        """Return what one request gets for a name; read its tensors if none has needed them yet.

        Raises:
            NotFound: if there is no such name, or its directory is gone before its first use.
            InvalidAdapter: if its directory fails a check that needs the tensors.
            Unavailable: if its directory was there before the pool restarted, and is missing.
        """
        while True:
            if name not in self._catalog and self._watcher.is_watching:
                await self._watcher.find(name)
            version = self._catalog.unread(name, request_id)
            if version is None:
                break
            await self._store.read(version)
            self._on_change()
        resolved = self._catalog.resolve(name, request_id)
        await self._state.settled(name_entry(name))
        return resolved

    @ray.method
    @pool_query
    async def record(self, name: str) -> AdapterRecord:
        """Return what is known of a name.

        Raises:
            NotFound: if there is no such name.
        """
        if name not in self._catalog and self._watcher.is_watching:
            await self._watcher.find(name)
        record = self._catalog.record(name)
        await self._state.settled(name_entry(name))
        return record

    @ray.method
    @pool_query
    async def absent(self, names: tuple[str, ...]) -> frozenset[str]:
        """Return which of these names stand for nothing now.

        One whose directory fails a check is not among them: `resolve` says why.
        """
        return frozenset([name for name in names if not await self._is_there(name)])

    @ray.method
    @pool_query
    async def records(self) -> tuple[AdapterRecord, ...]:
        """Return the whole catalogue by name."""
        records = self._catalog.records()
        await self._state.settled()
        return records

    @ray.method
    @pool_query
    async def shards(self, adapter: str) -> tuple[Shards, ...]:
        """Return the shards of each part of an adapter, in shared memory: a handle for each rank.

        Raises:
            NotFound: if a part has been unloaded, or its directory is gone.
            InvalidAdapter: if it must be read from disk again and is not what it was.
            Unavailable: if there is no room for the shards, or its directory was there before the
                pool restarted, and is missing.
        """
        return await self._obtain(adapter)

    @ray.method
    @pool_query
    async def prefetch(self, adapter: str) -> None:
        """Bring an adapter to host memory, because it will be wanted; raises as `shards` does."""
        await self._obtain(adapter)

    async def _is_there(self, name: str) -> bool:
        if name in self._catalog:
            return True
        if not self._watcher.is_watching:
            return False
        try:
            return await self._watcher.find(name)
        except TopworkError:
            return True

    async def _open_state(self) -> bool:
        """Read what was saved, once; return whether this has brought anything back."""
        has_brought_back = await self._state.open(self._roots)
        if has_brought_back:
            self._collector.take_over(self._config.silence)
        await self._staged.open()
        await self._usage.open()
        return has_brought_back

    async def _obtain(self, adapter: str) -> tuple[Shards, ...]:
        digests = [digest for digest, _ in parts_of(adapter)]
        for digest in digests:
            if self._collector.is_closed(digest):
                raise NotFound(f"The lora adapter of digest {shown(digest)} has been unloaded.")
        return tuple([await self._store.take(digest) for digest in digests])

    def _on_change(self) -> None:
        """Follow a change of the catalogue."""
        self._collector.update()
        self._send_pins()

    def _send_pins(self) -> None:
        """Let schedulers know what is pinned, if that has changed."""
        if self._num_sent_pin_changes != self._catalog.num_pin_changes:
            self._num_sent_pin_changes = self._catalog.num_pin_changes
            self._registry.send_pins()

    def _pinned(self) -> dict[str, int]:
        """Return what must keep its device slot, with the bytes that it claims."""
        return {facts.digest: facts.device_bytes for facts in self._catalog.pinned()}

    def _counts(self) -> PoolCounts:
        host = self._catalog.host_cache
        return PoolCounts(
            host_bytes=host.held_bytes,
            host_budget=host.budget,
            host_evictions=host.num_evicted,
            reads=dict(self._threads.results),
            read_seconds=self._threads.seconds.counts(),
            task_failures=dict(self._failures),
        )

    def _count_failure(self, task: str) -> None:
        self._failures[task] += 1


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
