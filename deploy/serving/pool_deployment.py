"""The adapter pool as a Serve deployment: one replica, which makes the pool actor and owns it.

The actor dies with the replica, so that Serve supervises both, and nothing of it outlives the
application but its state file. An actor that has died or does not answer is replaced, and goes on
with what the file says.
"""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.serve import Deployment
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.errors import TopworkError
from cluster.router.engine_client import EngineClient
from deploy.config import ServeConfig
from deploy.serving.launcher import end_process
from deploy.serving.pool_process import PoolProcess
from deploy.serving.pool_state_file import pool_state_file, server_id
from deploy.serving.process_setup import POOL_CPU, set_log_level
from deploy.serving.redeploy_scope import model_fingerprint
from deploy.serving.settings import adapter_catalog, check_on_this_node, pool_config
from worker.actor import ProcessIdentity

logger = logging.getLogger("topwork.pool")

POLL_INTERVAL = 0.1  # seconds between two questions whether an actor has died
HANG_TIMEOUT = 3.0  # seconds without an answer until an actor that lives is given up
CLOSE_TIMEOUT = 3.0  # seconds for the last writes of one that is to end


class PoolReplica:
    """Makes the pool actor, and tells the rest of the cluster where it is."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._fingerprint = model_fingerprint(config)
        self._live: dict[str, Any] = {}
        self._actor: Any = None
        self._process: ProcessIdentity | None = None
        self._create_lock = asyncio.Lock()

    async def reconfigure(self, live: dict[str, Any]) -> None:
        """Take in the adapters and the log level of a new configuration.

        Raises:
            TopworkError: at the start, if an adapter cannot be served; the message names it. Later
                that one is refused, and the rest goes on.
        """
        set_log_level(live["log_level"])
        self._live = live
        if self._actor is None:
            await self._create(is_first=True)
            return
        await self._actor.set_log_level.remote(live["log_level"])
        await self._actor.follow.remote(live["adapters"], tuple(live["adapter_dirs"]))

    async def locate(self, lost: str) -> tuple[str, Any]:
        """Return (fingerprint, actor); replace the actor if `lost` is its id and it is dead."""
        async with self._create_lock:
            if lost == self._actor._actor_id.hex() and not await self._is_alive():
                await self._create(is_first=False)
            return self._fingerprint, self._actor

    async def check_health(self) -> None:
        """Replace the actor if it is dead; raise if that fails."""
        async with self._create_lock:
            if self._actor is not None and not await self._is_alive():
                await self._create(is_first=False)

    async def __del__(self) -> None:
        """Let the actor write what is not on disk yet, then end. Serve waits for it."""
        if self._actor is None:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._actor.close.remote()
        except (RayError, TimeoutError) as error:
            logger.error("the adapter pool has not ended in order: %s", error)

    async def _is_alive(self) -> bool:
        """Tell whether the actor lives and answers, as soon as Ray knows."""
        try:
            async with asyncio.timeout(HANG_TIMEOUT):
                while True:
                    try:
                        await self._actor.identify.remote()
                        return True
                    except ActorDiedError:
                        return False
                    except ActorUnavailableError:  # dead or slow: Ray is finding out
                        await asyncio.sleep(POLL_INTERVAL)
        except TimeoutError:
            logger.error("the adapter pool has not answered for %g s", HANG_TIMEOUT)
            return False

    async def _create(self, *, is_first: bool) -> None:
        checked = await asyncio.to_thread(check_on_this_node, self._config)
        if self._actor is not None:
            ray.kill(self._actor)
        if self._process is not None:  # a stopped one does not hear Ray, and it has the state file
            await asyncio.to_thread(end_process, self._process, 0.0)
        adapters, directories = self._live["adapters"], tuple(self._live["adapter_dirs"])
        server = server_id()
        state = pool_state_file(self._config, server)
        here = ray.get_runtime_context().get_node_id()
        actor: Any = PoolProcess.options(
            num_cpus=0,
            max_concurrency=1000,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        ).remote(
            self._live["log_level"],
            replace(
                pool_config(checked, directories),
                state=str(state),
                staging=str(self._config.adapter_staging or f"{state}.staging"),
                server=server,
            ),
            adapter_catalog(self._config),
            EngineClient.connect,
        )
        try:
            self._process = await actor.identify.remote()
            if is_first:
                await actor.start.remote(adapters)
            else:
                await actor.follow.remote(adapters, directories)
        except RayError as error:
            cause = getattr(error, "cause", None)
            raise (cause if isinstance(cause, TopworkError) else error) from None
        self._actor = actor


def pool_deployment(config: ServeConfig) -> Deployment:
    """Return the adapter pool as a deployment that HTTP does not reach."""
    return serve.deployment(
        name="AdapterPool",
        num_replicas=1,
        user_config={
            "adapters": config.adapters(),
            "adapter_dirs": list(config.adapter_dir),
            "log_level": config.log_level,
        },
        max_ongoing_requests=1000,
        max_constructor_retry_count=3,
        # Not nothing: a head without CPUs has neither adapters nor memory for them.
        ray_actor_options={"num_cpus": POOL_CPU},
        health_check_period_s=1,
        graceful_shutdown_timeout_s=5,
        graceful_shutdown_wait_loop_s=0.2,
        logging_config={"log_level": config.log_level, "enable_access_log": False},
    )(PoolReplica)
