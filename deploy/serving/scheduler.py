"""A scheduler with its ranks as a Serve deployment."""

import asyncio
import gc
import os
import secrets
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from cluster.shells.kv_publisher import offset_port
from cluster.shells.scheduler_shell import SchedulerShell, SchedulerShellConfig
from deploy.serving.launcher import ActorLauncher, LaunchConfig
from deploy.serving.pool import PoolClient
from worker.actor import node_ip
from worker.rank_config import RankConfig


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
