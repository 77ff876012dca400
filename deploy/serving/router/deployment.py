"""The router as a Serve deployment: the one that HTTP reaches."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Deployment
from ray.serve.handle import DeploymentHandle

from deploy.config import ServeConfig
from deploy.serving.lifecycle.watchdog import Watchdog
from deploy.serving.pool.client import PoolClient
from deploy.serving.process_setup import ONE_CPU, give_way_soon, set_log_level
from deploy.serving.redeploy_scope import model_fingerprint
from deploy.serving.router.running_calls import CALLS, RETURNING_ALLOCATOR
from deploy.serving.settings import check_on_this_node, router_config

if TYPE_CHECKING:
    from cluster.router.router import Router

# Seconds that a router's event loop may stand still. HAProxy makes calls that it has not begun to
# answer again at another one, which is to serve them within two seconds; where there is none,
# whoever reads a stream is better served by a router that comes back.
HANG_TIMEOUT = 1.2
HANG_TIMEOUT_ALONE = 4.5


class RouterPool(PoolClient):
    """The pool as one router asks it: also one that is to go refuses calls."""

    is_leaving = False

    async def is_drained(self) -> bool:
        return self.is_leaving or await super().is_drained()


class RouterReplica:
    """One router as a Serve replica, whose own loop runs it."""

    def __init__(
        self, config: ServeConfig, pool: DeploymentHandle[Any], schedulers: DeploymentHandle[Any]
    ) -> None:
        # Schedulers are reached over sockets; their handle makes them part of the application.
        self._config = config
        self._pool = RouterPool(pool, model_fingerprint(config))
        self._router: Router | None = None

    def __serve_build_asgi_app__(self) -> FastAPI:
        # They take seconds to import, and only routers need them.
        from cluster.api.app import create_app
        from cluster.router.router import Router

        router = Router(router_config(check_on_this_node(self._config)), self._pool)
        self._router = router

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            is_alone = (self._config.routers or 1) == 1
            Watchdog(HANG_TIMEOUT_ALONE if is_alone else HANG_TIMEOUT).start()
            await router.start()
            give_way_soon()
            yield
            await router.close()

        return create_app(router, lifespan, sends_ids=False)

    async def drain(self) -> int:
        """Refuse new calls from now on; return how many have not been answered to their end.

        When all have, what they used is told to the pool, which Serve may end before this router.
        """
        if self._router is None:
            return 0
        self._pool.is_leaving = self._router.is_draining = True
        left = max(self._router.num_in_flight, CALLS.num_running)
        if not left:
            await self._router.aggregation.flush()
        return left

    def reconfigure(self, live: dict[str, Any]) -> None:
        """Take in the log level of a new configuration."""
        set_log_level(live["log_level"])


def router_deployment(config: ServeConfig) -> Deployment:
    """Return the HTTP face as a deployment."""
    return serve.deployment(
        name="Router",
        num_replicas=config.routers or 1,
        user_config={"log_level": config.log_level},
        max_ongoing_requests=100_000,  # the router's own limits answer 429 with a reason
        max_surge_percent=100,  # an update starts the new ones first
        ray_actor_options={
            "num_cpus": ONE_CPU,
            "runtime_env": {"env_vars": RETURNING_ALLOCATOR},
        },
        graceful_shutdown_timeout_s=config.drain_timeout + 5,
        graceful_shutdown_wait_loop_s=0.2,
        logging_config={"log_level": config.log_level, "enable_access_log": False},
    )(serve.ingress()(RouterReplica))
