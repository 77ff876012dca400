"""The adapter-pool actor: makes it, and calls it for routers and schedulers."""

from typing import Any, cast

import ray
from ray.exceptions import RayError

from cluster.adapters.pool import AdapterPool
from cluster.adapters.record import AdapterRecord, ResolvedAdapter, UnloadResult
from cluster.errors import Unavailable
from cluster.ledger import Page, RouterCounts
from cluster.router.scheduler_client import SchedulerClient
from cluster.shells.pool_shell import AdapterPoolActor, PoolShellConfig
from cluster.wire import SchedulerAddress

PoolActor = ray.remote(AdapterPoolActor)


class PoolClient:
    """The pool actor as routers and schedulers call it; its death is an Unavailable."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def _ask(self, method: str, *arguments: object) -> Any:
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, Exception):
                raise cause from None
            raise Unavailable("the adapter pool is down", retry_after=5) from error

    async def shards(self, adapter: str) -> tuple[tuple[Any, ...], ...]:
        return cast(tuple[tuple[Any, ...], ...], await self._ask("shards", adapter))

    async def prefetch(self, adapter: str) -> None:
        await self._ask("prefetch", adapter)

    async def resolve(self, name: str, request_id: str) -> ResolvedAdapter:
        return cast(ResolvedAdapter, await self._ask("resolve", name, request_id))

    async def record(self, name: str) -> AdapterRecord:
        return cast(AdapterRecord, await self._ask("record", name))

    async def load(self, name: str, path: str, load_inplace: bool, pinned: bool) -> AdapterRecord:
        return cast(AdapterRecord, await self._ask("load", name, path, load_inplace, pinned))

    async def unload(self, name: str, force: bool) -> UnloadResult:
        return cast(UnloadResult, await self._ask("unload", name, force))

    async def rollback(self, name: str, version: int | None) -> AdapterRecord:
        return cast(AdapterRecord, await self._ask("rollback", name, version))

    async def split(self, name: str, shares: dict[int, int]) -> AdapterRecord:
        return cast(AdapterRecord, await self._ask("split", name, shares))

    async def records(self) -> tuple[AdapterRecord, ...]:
        return cast(tuple[AdapterRecord, ...], await self._ask("records"))

    async def enter(self, counts: RouterCounts, wants_all: bool) -> Page:
        return cast(Page, await self._ask("enter", counts, wants_all))

    async def schedulers(self) -> tuple[SchedulerAddress, ...]:
        return cast(tuple[SchedulerAddress, ...], await self._ask("schedulers"))

    async def attach(self, address: SchedulerAddress) -> None:
        await self._ask("attach", address)


def start_pool(config: PoolShellConfig, pool: AdapterPool) -> Any:
    """Make the adapter-pool actor."""
    return PoolActor.options(name="adapter-pool", num_cpus=0, max_concurrency=1000).remote(
        config, pool, SchedulerClient.connect
    )
