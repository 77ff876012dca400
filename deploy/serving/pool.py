"""The adapter pool as a Serve deployment: one replica, which makes the pool actor and owns it.

The actor dies with the replica, so that Serve supervises both, and nothing of it outlives the
application. An actor that has died alone is replaced at once, by what the configuration says: what
calls had loaded is forgotten then, for a name without its file would be no better. Knows nothing of
what an adapter is.
"""

import asyncio
from typing import Any

import ray
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.serve import Deployment
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.errors import TopworkError
from cluster.router.engine_client import EngineClient
from deploy.config import ServeConfig
from deploy.serving.logs import set_log_level
from deploy.serving.pool_actor import PoolProcess
from deploy.serving.ray_resources import POOL_CPU
from deploy.serving.redeploy_scope import edition
from deploy.serving.settings import adapter_pool, known_here, pool_config

VERDICT_INTERVAL = 0.1  # seconds between two questions whether an actor has died


class PoolReplica:
    """Makes the pool actor, and tells the rest of the cluster where it is."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._edition = edition(config)
        self._live: dict[str, Any] = {}
        self._actor: Any = None
        self._making = asyncio.Lock()

    async def reconfigure(self, live: dict[str, Any]) -> None:
        """Take in the adapters and the log level of a new configuration.

        Raises:
            TopworkError: at the start, if an adapter cannot be served; the message names it. Later
                that one is refused, and the rest goes on.
        """
        set_log_level(live["log_level"])
        self._live = live
        if self._actor is None:
            await self._make(is_first=True)
            return
        await self._actor.set_log_level.remote(live["log_level"])
        await self._actor.follow.remote(live["adapters"], tuple(live["adapter_dirs"]))

    async def reach(self, lost: str) -> tuple[str, Any]:
        """Return (edition, the actor); make it anew if it is the one that was lost, by its id."""
        async with self._making:
            if lost == self._actor._actor_id.hex() and not await self._lives():
                await self._make(is_first=False)
            return self._edition, self._actor

    async def check_health(self) -> None:
        """Look after the actor; raise if it cannot be made to live."""
        async with self._making:
            if self._actor is not None and not await self._lives():
                await self._make(is_first=False)

    async def _lives(self) -> bool:
        """Tell whether the actor lives, as soon as Ray knows."""
        while True:
            try:
                await self._actor.is_drained.remote()
                return True
            except ActorDiedError:
                return False
            except ActorUnavailableError:  # dead or slow: Ray is finding out
                await asyncio.sleep(VERDICT_INTERVAL)

    async def _make(self, *, is_first: bool) -> None:
        checked = await asyncio.to_thread(known_here, self._config)
        if self._actor is not None:
            ray.kill(self._actor)
        adapters, directories = self._live["adapters"], tuple(self._live["adapter_dirs"])
        here = ray.get_runtime_context().get_node_id()
        actor: Any = PoolProcess.options(
            num_cpus=0,
            max_concurrency=1000,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        ).remote(
            self._live["log_level"],
            pool_config(checked, directories),
            adapter_pool(self._config),
            EngineClient.connect,
        )
        if is_first:
            try:
                await actor.start.remote(adapters)
            except RayError as error:
                cause = getattr(error, "cause", None)
                raise (cause if isinstance(cause, TopworkError) else error) from None
        else:
            await actor.follow.remote(adapters, directories)
        self._actor = actor


def pool_deployment(config: ServeConfig) -> Deployment:
    """Return the adapter pool as a deployment that HTTP does not reach."""
    return serve.deployment(
        name="AdapterCatalog",
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
