"""A scheduler with its ranks as a Serve deployment."""

import asyncio
import gc
import logging
import math
import os
import secrets
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve import Deployment
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.serve.handle import DeploymentHandle

from cluster.engine.engine import Engine, EngineConfig
from cluster.engine.kv_event_publisher import offset_port
from cluster.errors import Unavailable
from cluster.messages import SchedulerAddress
from deploy.config import ServeConfig
from deploy.serving.cluster_tls import ranks_stay_on_one_host
from deploy.serving.launcher import ActorLauncher, LaunchConfig
from deploy.serving.lifecycle.watchdog import Watchdog
from deploy.serving.pool.client import PoolClient
from deploy.serving.process_setup import ONE_CPU, restore_cpu_priority, set_log_level
from deploy.serving.redeploy_scope import model_fingerprint
from deploy.serving.settings import check_on_this_node, scheduler_settings
from worker.actor import node_ip

logger = logging.getLogger("topwork.scheduler")

ATTACH_INTERVAL = 1.0  # seconds until a pool that has restarted hears of a scheduler
DETACH_TIMEOUT = 5.0  # seconds that a pool may take to hear that one leaves
END_TIMEOUT = 15.0  # seconds beyond the drain until the ranks have ended
HANG_TIMEOUT = 4.5  # seconds that its event loop may stand still
LOAD_METRIC = "requests"  # that run or wait on a replica, as it reports them to the autoscaler
SCALE_DOWN_LOAD = 0.75  # a replica is given up only if the others are no fuller than this then


class SchedulerReplica:
    """One scheduler and its ranks as a Serve replica, which owns one bundle for each rank."""

    def __init__(self, config: ServeConfig, pool: DeploymentHandle[Any]) -> None:
        self._config = config
        self._pool = PoolClient(pool, model_fingerprint(config))
        self._drain_timeout = config.drain_timeout
        self._engine: Engine | None = None
        self._attaching: asyncio.Task[None] | None = None
        # Serve gives its number to another replica when this one goes, and never twice its id.
        self._name = serve.get_replica_context().replica_id.unique_id

    async def reconfigure(self, live: dict[str, Any]) -> None:
        """Take in what may change while serving; the first time, return when the ranks are up."""
        set_log_level(live["log_level"])
        self._drain_timeout = live["drain_timeout"]
        if self._engine is None:
            await self._start()

    async def _start(self) -> None:
        Watchdog(HANG_TIMEOUT).start()  # before: it must not halt a rank when it wakes up
        restore_cpu_priority()  # ranks wait for plans
        settings = scheduler_settings(await asyncio.to_thread(check_on_this_node, self._config))
        group = ray.util.get_current_placement_group()
        assert group is not None, "the deployment asks for a placement group"
        launcher = ActorLauncher(
            LaunchConfig(
                settings.rank,
                secrets.token_bytes(32),
                settings.group_timeout,
                on_loopback=ranks_stay_on_one_host(self._config),
            ),
            group,
        )
        number = serve.get_replica_context().rank.rank
        config = _replica_config(settings.engine, self._name, number)
        self._engine = Engine(config, launcher, self._pool)
        address = await self._engine.start(node_ip())
        self._engine.on_crash(_crash)
        # At once: routers tell what keeps the ranks from coming up.
        self._attaching = asyncio.create_task(self._stay_attached(address))
        # What was imported stays for good: else each full collection walks all of Ray's objects,
        # and a step waits up to 100 ms for it.
        gc.collect()
        gc.freeze()
        await self._engine.wait_until_up()

    async def _stay_attached(self, address: SchedulerAddress) -> None:
        while True:
            with suppress(Unavailable):  # the pool restarts: it hears it the next time
                await self._pool.attach(address)
            await asyncio.sleep(ATTACH_INTERVAL)

    def check_health(self) -> None:
        """Raise if no router can learn of this scheduler; the ranks' health is /health's."""
        if self._attaching is not None and self._attaching.done():
            self._attaching.result()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load as Serve's autoscaler asks for it."""
        if self._engine is None:
            return {LOAD_METRIC: 0}
        status = self._engine.status(0)
        return {LOAD_METRIC: status.scheduler.num_running + status.scheduler.num_waiting}

    async def __del__(self) -> None:
        """Leave the pool's list, end what runs, then the ranks. Serve waits for it."""
        if self._engine is None or self._attaching is None:
            return
        self._attaching.cancel()
        with suppress(Unavailable, TimeoutError):  # without a pool the routers hear it from here
            async with asyncio.timeout(DETACH_TIMEOUT):
                await self._pool.detach(self._name)
        left = await self._engine.drain(self._drain_timeout)
        if left:
            logger.warning("%d requests did not end in %g s", left, self._drain_timeout)
        await self._engine.close()


def _replica_config(config: EngineConfig, name: str, number: int) -> EngineConfig:
    """Return the configuration of one replica: with its name, and ports and a log of its own."""
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
    return replace(config, replica=name, kv_publisher=publisher, recording=recording)


def _crash() -> None:
    """End the process after a bug in the scheduler, so that Serve starts a clean one."""
    os._exit(1)


def scheduler_deployment(config: ServeConfig) -> Deployment:
    """Return the schedulers as a deployment that HTTP does not reach."""
    bundle = {"GPU": 1.0} if config.device == "cuda" else {"CPU": ONE_CPU}
    return serve.deployment(
        name="Scheduler",
        user_config={"log_level": config.log_level, "drain_timeout": config.drain_timeout},
        max_surge_percent=1 if config.surge else 0,  # rounded up: one at a time
        max_constructor_retry_count=3,
        ray_actor_options={"num_cpus": ONE_CPU},
        placement_group_bundles=[{"CPU": ONE_CPU}, *([bundle] * config.tp)],
        placement_group_strategy="STRICT_PACK" if ranks_stay_on_one_host(config) else "PACK",
        health_check_period_s=2,
        graceful_shutdown_timeout_s=config.drain_timeout + END_TIMEOUT,
        graceful_shutdown_wait_loop_s=0.2,
        logging_config={"log_level": config.log_level, "enable_access_log": False},
        **_replica_count(config),
    )(SchedulerReplica)


def _replica_count(config: ServeConfig) -> dict[str, Any]:
    if config.max_replicas is None:
        return {"num_replicas": config.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=config.replicas,
            max_replicas=config.max_replicas,
            target_ongoing_requests=config.num_sequences(config.device),
            upscale_delay_s=config.scale_up_delay,
            downscale_delay_s=config.scale_down_delay,
            look_back_period_s=12.0,  # Serve wants more than its ten seconds of an interval
            policy=AutoscalingPolicy(policy_function=autoscale),  # type: ignore[no-untyped-call]
        )
    }


def autoscale(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of schedulers that Serve should aim at; it adds delays and bounds.

    Requests reach schedulers over sockets, past Serve, so what counts is what replicas report.
    """
    reported = (context.aggregated_metrics or {}).get(LOAD_METRIC, {})
    assert context.config is not None, "the deployment has an autoscaling_config"
    capacity = context.config.target_ongoing_requests
    return desired_replicas(sum(reported.values()), capacity, context.target_num_replicas), {}


def desired_replicas(num_requests: float, capacity: float, current: int) -> int:
    """Return how many replicas, each for `capacity` requests, suit a number of requests.

    One is added when the requests exceed the capacity; one goes only when the rest would have
    capacity to spare, so that the number does not swing.
    """
    full = max(1, math.ceil(num_requests / capacity))
    if full >= current:
        return full
    return min(current, max(1, math.ceil(num_requests / (SCALE_DOWN_LOAD * capacity))))
