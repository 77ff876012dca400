"""The adapter pool as an actor: reads adapter files in threads, keeps the catalogue on its loop.

Also the meeting point of the cluster: scheduler replicas attach here, routers ask here for them.
What a name means and which adapters stay in host memory is decided by AdapterPool.
"""

import asyncio
from pathlib import Path
from typing import Any

import ray

from cluster.adapters.adapter import Adapter
from cluster.adapters.peft_reader import AdapterLimits, read_adapter
from cluster.adapters.pool import AdapterPool
from cluster.adapters.record import AdapterRecord, UnloadResult
from cluster.adapters.sharding import cut_all
from cluster.errors import InvalidAdapter
from cluster.wire import SchedulerAddress
from worker.model_config import ModelConfig


class AdapterPoolActor:
    """One pool for all routers and schedulers of a cluster."""

    def __init__(self, model: ModelConfig, limits: AdapterLimits, pool: AdapterPool) -> None:
        self._model = model
        self._limits = limits
        self._pool = pool
        self._schedulers: dict[str, SchedulerAddress] = {}
        self._reading: dict[str, asyncio.Task[Adapter]] = {}  # by digest: reads from disk again

    @ray.method
    async def load(self, name: str, path: str, load_inplace: bool, pinned: bool) -> AdapterRecord:
        """Check an adapter directory and publish it under a name.

        Raises:
            InvalidRequest: if the name cannot be taken.
            InvalidAdapter: if the directory fails a check.
        """
        self._pool.check_name(name, load_inplace=load_inplace)
        adapter = await asyncio.to_thread(read_adapter, Path(path), self._model, self._limits)
        return self._pool.publish(name, adapter, load_inplace=load_inplace, pinned=pinned)

    @ray.method
    async def unload(self, name: str) -> UnloadResult:
        """Take a name out of the catalogue.

        Raises:
            NotFound: if there is no such name.
        """
        return self._pool.unload(name)

    @ray.method
    async def forget(self, digest: str) -> None:
        """Free the host memory of an adapter that no name points at."""
        self._pool.forget(digest)

    @ray.method
    async def resolve(self, name: str) -> AdapterRecord:
        """Return what a name points at.

        Raises:
            NotFound: if there is no such name.
        """
        return self._pool.resolve(name)

    @ray.method
    async def records(self) -> tuple[AdapterRecord, ...]:
        """Return the whole catalogue by name."""
        return self._pool.records()

    @ray.method
    async def shards(self, digest: str, tp: int) -> tuple[Any, ...]:
        """Return one object reference per rank; the objects are in the store already.

        Raises:
            NotFound: if the adapter has been unloaded.
            InvalidAdapter: if it must be read from disk again and is not what it was.
        """
        path = self._pool.missing(digest)
        if path is not None:
            await self._read_again(digest, path)
        # No await between these two: another load could evict what was just brought back.
        adapter = self._pool.take(digest)
        shards = await asyncio.to_thread(cut_all, adapter, tp)
        return tuple(ray.put(shard) for shard in shards)

    async def _read_again(self, digest: str, path: str) -> None:
        """Bring an adapter back to the host tier; callers at the same time share one read."""
        reading = self._reading.get(digest)
        if reading is None:
            reading = asyncio.create_task(
                asyncio.to_thread(read_adapter, Path(path), self._model, self._limits)
            )
            self._reading[digest] = reading
            reading.add_done_callback(lambda _: self._reading.pop(digest))
        adapter = await asyncio.shield(reading)
        if adapter.digest != digest:
            raise InvalidAdapter(
                f"adapter directory {path} has changed on disk since it was loaded; "
                "load it again with load_inplace"
            )
        self._pool.restore(adapter)

    @ray.method
    async def attach(self, address: SchedulerAddress) -> None:
        """Make a scheduler replica known; the latest address of a replica counts."""
        self._schedulers[address.replica] = address

    @ray.method
    async def detach(self, replica: str) -> None:
        """Forget a scheduler replica that has ended."""
        self._schedulers.pop(replica, None)

    @ray.method
    async def schedulers(self) -> tuple[SchedulerAddress, ...]:
        """Return all attached scheduler replicas in order of their names."""
        return tuple(self._schedulers[name] for name in sorted(self._schedulers))
