"""The adapter pool as routers and schedulers call it, wherever it is and however often it restarts.

Serve's handle tells where the pool actor is; calls go straight to the actor, at half the cost. What
changes nothing is asked once more when the actor was lost. Knows nothing of what an adapter is.
"""

import asyncio
from typing import Any, cast

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.adapters.records import AdapterRecord, ResolvedAdapter, UnloadResult
from cluster.errors import Unavailable
from cluster.messages import SchedulerAddress
from cluster.metrics_hub import Page, RouterCounts

PATIENCE = 30.0  # seconds for a pool that is being made anew
RETRY_AFTER = 5


class PoolClient:
    """Calls the pool of one edition; its death is an Unavailable."""

    def __init__(self, handle: DeploymentHandle[Any], edition: str) -> None:
        self._handle = handle
        self._edition = edition
        self._actor: Any = None
        self._lost = ""  # the id of the actor that did not answer
        self._finding: asyncio.Task[Any] | None = None

    async def shards(self, adapter: str) -> tuple[tuple[Any, ...], ...]:
        return cast(tuple[tuple[Any, ...], ...], await self._ask("shards", adapter))

    async def prefetch(self, adapter: str) -> None:
        await self._ask("prefetch", adapter)

    async def resolve(self, name: str, request_id: str) -> ResolvedAdapter:
        return cast(ResolvedAdapter, await self._ask("resolve", name, request_id))

    async def record(self, name: str) -> AdapterRecord:
        return cast(AdapterRecord, await self._ask("record", name))

    async def load(self, name: str, path: str, load_inplace: bool, pinned: bool) -> AdapterRecord:
        return cast(AdapterRecord, await self._call("load", name, path, load_inplace, pinned))

    async def unload(self, name: str, force: bool) -> UnloadResult:
        return cast(UnloadResult, await self._call("unload", name, force))

    async def rollback(self, name: str, version: int | None) -> AdapterRecord:
        return cast(AdapterRecord, await self._call("rollback", name, version))

    async def split(self, name: str, shares: dict[int, int]) -> AdapterRecord:
        return cast(AdapterRecord, await self._call("split", name, shares))

    async def records(self) -> tuple[AdapterRecord, ...]:
        return cast(tuple[AdapterRecord, ...], await self._ask("records"))

    async def enter(self, counts: RouterCounts, wants_all: bool) -> Page:
        return cast(Page, await self._ask("enter", counts, wants_all))

    async def schedulers(self) -> tuple[SchedulerAddress, ...]:
        return cast(tuple[SchedulerAddress, ...], await self._ask("schedulers"))

    async def drain(self) -> None:
        await self._ask("drain")

    async def is_drained(self) -> bool:
        return cast(bool, await self._ask("is_drained"))

    async def attach(self, address: SchedulerAddress) -> None:
        await self._ask("attach", address)

    async def detach(self, replica: str) -> None:
        await self._ask("detach", replica)

    async def _ask(self, method: str, *arguments: object) -> Any:
        """Call what may be called twice."""
        try:
            return await self._call(method, *arguments)
        except _Lost:
            return await self._call(method, *arguments)

    async def _call(self, method: str, *arguments: object) -> Any:
        actor = await self._reach()
        try:
            return await getattr(actor, method).remote(*arguments)
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            if self._actor is actor:
                self._actor, self._lost = None, actor._actor_id.hex()
            raise _Lost("the adapter pool is down", retry_after=RETRY_AFTER) from error

    async def _reach(self) -> Any:
        """Return the actor; all who want it now wait for one answer."""
        if self._actor is None:
            if self._finding is None or self._finding.done():
                self._finding = asyncio.create_task(self._find())
            self._actor = await asyncio.shield(self._finding)
        return self._actor

    async def _find(self) -> Any:
        try:
            async with asyncio.timeout(PATIENCE):
                edition, actor = await self._handle.reach.remote(self._lost)
        except (RayError, RayServeException, TimeoutError) as error:
            raise Unavailable("the adapter pool is down", retry_after=RETRY_AFTER) from error
        if edition != self._edition:
            raise Unavailable(
                "the adapter pool has another configuration: an update is under way",
                retry_after=RETRY_AFTER,
            )
        return actor


class _Lost(Unavailable):
    """The actor died, or cannot be reached."""
