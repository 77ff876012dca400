"""The adapter pool as routers and schedulers call it, wherever it is and however often it restarts.

Serve's handle returns the pool actor; calls go straight to the actor, at half the cost. A call that
may be repeated is repeated once when the actor was lost.
"""

import asyncio
from typing import Any, cast

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.adapters.records import AdapterRecord, LoadOptions, ResolvedAdapter, UnloadResult
from cluster.errors import Replaced, Unavailable
from cluster.messages import AttachedSchedulers, SchedulerAddress
from cluster.metrics_hub import ClusterCounts, RouterCounts
from cluster.tenancy.leases import LeaseCall, LeaseReply
from cluster.tenancy.owners import Caller

LOCATE_TIMEOUT = 30.0  # seconds for a pool that is being restarted
POLL_INTERVAL = 0.05  # seconds between two looks for a pool that replaces another
RETRY_AFTER = 5


class PoolClient:
    """Calls the pool of one model fingerprint; its death is an Unavailable."""

    def __init__(self, handle: DeploymentHandle[Any], fingerprint: str) -> None:
        self._handle = handle
        self._fingerprint = fingerprint
        self._actor: Any = None
        self._lost = ""  # the id of the actor that did not answer
        self._replaced: set[str] = set()  # ids of actors that have begun to end
        self._locating: asyncio.Task[Any] | None = None

    async def shards(self, adapter: str) -> tuple[tuple[Any, ...], ...]:
        return cast(tuple[tuple[Any, ...], ...], await self._call_twice("shards", adapter))

    async def prefetch(self, adapter: str) -> None:
        await self._call_twice("prefetch", adapter)

    async def resolve(self, name: str, request_id: str) -> ResolvedAdapter:
        return cast(ResolvedAdapter, await self._call_twice("resolve", name, request_id))

    async def record(self, name: str) -> AdapterRecord:
        return cast(AdapterRecord, await self._call_twice("record", name))

    async def absent(self, names: tuple[str, ...]) -> frozenset[str]:
        return cast(frozenset[str], await self._call_twice("absent", names))

    async def load(
        self,
        name: str,
        path: str,
        load_inplace: bool,
        pinned: bool,
        sha256: str | None = None,
        root: str | None = None,
        caller: Caller | None = None,
    ) -> AdapterRecord:
        record = await self._call("load", name, path, load_inplace, pinned, sha256, root, caller)
        return cast(AdapterRecord, record)

    async def begin_upload(
        self, name: str, load_inplace: bool, num_bytes: int | None, caller: Caller | None = None
    ) -> str:
        return cast(str, await self._call("begin_upload", name, load_inplace, num_bytes, caller))

    async def upload_piece(self, upload: str, offset: int, data: bytes) -> None:
        await self._call("upload_piece", upload, offset, data)

    async def finish_upload(
        self, upload: str, name: str, config: bytes | None, options: LoadOptions
    ) -> AdapterRecord:
        record = await self._call("finish_upload", upload, name, config, options)
        return cast(AdapterRecord, record)

    async def abort_upload(self, upload: str) -> None:
        await self._call_twice("abort_upload", upload)

    async def load_tensors(
        self, name: str, path: str, config: bytes, options: LoadOptions
    ) -> AdapterRecord:
        record = await self._call("load_tensors", name, path, config, options)
        return cast(AdapterRecord, record)

    async def unload(self, name: str, force: bool) -> UnloadResult:
        return cast(UnloadResult, await self._call("unload", name, force))

    async def rollback(self, name: str, version: int | None) -> AdapterRecord:
        return cast(AdapterRecord, await self._call("rollback", name, version))

    async def split(self, name: str, shares: dict[int, int]) -> AdapterRecord:
        return cast(AdapterRecord, await self._call("split", name, shares))

    async def pin(self, name: str, caller: Caller | None = None) -> AdapterRecord:
        return cast(AdapterRecord, await self._call("pin", name, caller))

    async def unpin(self, name: str) -> AdapterRecord:
        return cast(AdapterRecord, await self._call("unpin", name))

    async def records(self) -> tuple[AdapterRecord, ...]:
        return cast(tuple[AdapterRecord, ...], await self._call_twice("records"))

    async def report(self, counts: RouterCounts, wants_all: bool) -> ClusterCounts:
        return cast(ClusterCounts, await self._call_twice("report", counts, wants_all))

    async def lease(self, call: LeaseCall) -> LeaseReply:
        return cast(LeaseReply, await self._call("lease", call))

    async def schedulers(self) -> AttachedSchedulers:
        return cast(AttachedSchedulers, await self._call_twice("schedulers"))

    async def drain(self) -> None:
        await self._call_twice("drain")

    async def undrain(self) -> None:
        await self._call_twice("undrain")

    async def is_drained(self) -> bool:
        return cast(bool, await self._call_twice("is_drained"))

    async def attach(self, address: SchedulerAddress) -> None:
        await self._call_twice("attach", address)

    async def detach(self, replica: str) -> None:
        await self._call_twice("detach", replica)

    async def _call_twice(self, method: str, *arguments: object) -> Any:
        """Call a method, and once more if the actor was lost."""
        try:
            return await self._call_once(method, *arguments)
        except _ActorLost:
            return await self._call(method, *arguments)

    async def _call(self, method: str, *arguments: object) -> Any:
        """Call a method; that the actor was lost is an error like others."""
        try:
            return await self._call_once(method, *arguments)
        except _ActorLost as error:
            raise Unavailable(error.message, retry_after=error.retry_after) from error

    async def _call_once(self, method: str, *arguments: object) -> Any:
        """Call a method of the actor, or of the one that replaces it."""
        while True:
            actor = await self._located_actor()
            try:
                return await getattr(actor, method).remote(*arguments)
            except RayTaskError as error:
                if not isinstance(error.cause, Replaced):
                    raise error.cause from None
                self._lose(actor)
                self._replaced.add(actor._actor_id.hex())
            except RayError as error:
                self._lose(actor)
                raise _ActorLost("the adapter pool is down", retry_after=RETRY_AFTER) from error

    def _lose(self, actor: Any) -> None:
        if self._actor is actor:
            self._actor, self._lost = None, actor._actor_id.hex()

    async def _located_actor(self) -> Any:
        """Return the actor; concurrent callers share one request for it."""
        if self._actor is None:
            if self._locating is None or self._locating.done():
                self._locating = asyncio.create_task(self._locate())
            self._actor = await asyncio.shield(self._locating)
        return self._actor

    async def _locate(self) -> Any:
        try:
            async with asyncio.timeout(LOCATE_TIMEOUT):
                fingerprint, actor = await self._handle.locate.remote(self._lost)
                while actor._actor_id.hex() in self._replaced:  # by one that has not begun yet
                    await asyncio.sleep(POLL_INTERVAL)
                    fingerprint, actor = await self._handle.locate.remote(self._lost)
        except (RayError, RayServeException, TimeoutError) as error:
            raise Unavailable("the adapter pool is down", retry_after=RETRY_AFTER) from error
        if fingerprint != self._fingerprint:
            raise Unavailable(
                "the adapter pool has another configuration: an update is under way",
                retry_after=RETRY_AFTER,
            )
        return actor


class _ActorLost(Unavailable):
    """The actor died, or cannot be reached."""
