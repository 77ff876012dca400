"""Composes the cluster: pool actor, scheduler deployment with its ranks, router deployment.

The only place where actors come to be (with launcher.py beside it, for the ranks).
"""

import asyncio
import gc
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application

from cluster.adapters.pool import AdapterPool
from cluster.adapters.record import AdapterRecord, ResolvedAdapter, UnloadResult
from cluster.errors import Unavailable
from cluster.router.app import create_app
from cluster.router.config import RouterConfig
from cluster.router.router import Router
from cluster.router.scheduler_client import SchedulerClient
from cluster.shells.kv_publisher import offset_port
from cluster.shells.pool_shell import AdapterPoolActor, PoolShellConfig
from cluster.shells.scheduler_shell import SchedulerShell, SchedulerShellConfig
from cluster.wire import SchedulerAddress
from deploy.serving.launcher import ActorLauncher, LaunchConfig
from worker.actor import node_ip
from worker.rank import RankConfig

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

    async def schedulers(self) -> tuple[SchedulerAddress, ...]:
        return cast(tuple[SchedulerAddress, ...], await self._ask("schedulers"))

    async def attach(self, address: SchedulerAddress) -> None:
        await self._ask("attach", address)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """What every scheduler replica is made from."""

    shell: SchedulerShellConfig  # `replica` is filled in by the replica itself
    rank: RankConfig
    group_timeout: float  # seconds a collective may take


class SchedulerReplica:
    """One scheduler and its ranks as a Serve replica, which owns one bundle for each rank."""

    def __init__(self, settings: SchedulerSettings, pool: Any) -> None:
        self._settings = settings
        self._pool = PoolClient(pool)
        self._shell: SchedulerShell | None = None
        self._starting = asyncio.create_task(self._start())

    async def _start(self) -> None:
        settings = self._settings
        group = ray.util.get_current_placement_group()
        assert group is not None, "the deployment asks for a placement group"
        launcher = ActorLauncher(
            LaunchConfig(settings.rank, secrets.token_bytes(32), settings.group_timeout),
            group,
        )
        shell_config = _of_replica(settings.shell, serve.get_replica_context().rank.rank)
        self._shell = SchedulerShell(shell_config, launcher, self._pool)
        address = await self._shell.start(node_ip())
        self._shell.on_crash(_crash)
        # What was imported stays for good: else each full collection walks all of Ray's objects,
        # and a step waits up to 100 ms for it.
        gc.collect()
        gc.freeze()
        await self._pool.attach(address)

    def check_health(self) -> None:
        """Raise if the start has failed; the ranks' own health is told by /health."""
        if self._starting.done():
            self._starting.result()


def _of_replica(config: SchedulerShellConfig, number: int) -> SchedulerShellConfig:
    """Return what one replica is told: its name, and ports of its own."""
    publisher = config.kv_publisher
    if publisher is not None:
        replay = publisher.replay_endpoint
        publisher = replace(
            publisher,
            endpoint=offset_port(publisher.endpoint, number),
            replay_endpoint=None if replay is None else offset_port(replay, number),
        )
    recording = config.recording
    if recording is not None and number > 0:
        recording = replace(recording, path=f"{recording.path}-{number}")
    return replace(config, replica=str(number), kv_publisher=publisher, recording=recording)


def _crash() -> None:
    """End the process after a bug in the scheduler, so that Serve starts a clean one."""
    os._exit(1)


def start_pool(config: PoolShellConfig, pool: AdapterPool) -> Any:
    """Make the adapter-pool actor."""
    return PoolActor.options(name="adapter-pool", num_cpus=0, max_concurrency=1000).remote(
        config, pool, SchedulerClient.connect
    )


def scheduler_application(settings: SchedulerSettings, pool: Any) -> Application:
    """Return the scheduler as a Serve application that HTTP does not reach."""
    bundle = {"GPU": 1.0} if settings.rank.device == "cuda" else {"CPU": 1.0}
    deployment = serve.deployment(
        name="Scheduler",
        ray_actor_options={"num_cpus": 1},
        placement_group_bundles=[{"CPU": 1.0}, *([bundle] * settings.rank.tp)],
        placement_group_strategy="PACK",
        health_check_period_s=2,
    )(SchedulerReplica)
    return deployment.bind(settings, pool)


def router_application(config: RouterConfig, pool: Any, replicas: int) -> Application:
    """Return the HTTP face as a Serve application."""

    def build() -> FastAPI:
        router = Router(config, PoolClient(pool))

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            await router.start()
            yield
            await router.close()

        return create_app(router, lifespan)

    deployment = serve.deployment(
        name="Router",
        num_replicas=replicas,
        max_ongoing_requests=100_000,  # the router's own limits answer 429 with a reason
        ray_actor_options={"num_cpus": 1},
    )(serve.ingress(build)())
    return deployment.bind()
