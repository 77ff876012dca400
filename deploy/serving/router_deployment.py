"""The router as a Serve deployment: the one that HTTP reaches.

Also the middleware that Serve puts around all HTTP that reaches a router: Serve sends each request
id back as it came, so an id must be safe before Serve sees it. `deploy.serving.haproxy` names it in
the environment.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Deployment
from ray.serve.handle import DeploymentHandle
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.http import REQUEST_ID_HEADER, safe_id
from deploy.config import ServeConfig
from deploy.serving.pool_client import PoolClient
from deploy.serving.process_setup import ONE_CPU, set_log_level
from deploy.serving.redeploy_scope import model_fingerprint
from deploy.serving.settings import check_on_this_node, router_config
from deploy.serving.watchdog import Watchdog

HANG_TIMEOUT = 10.0  # seconds that its event loop may stand still: a call may take some of them


class RouterReplica:
    """One router as a Serve replica, whose own loop runs it."""

    def __init__(
        self, config: ServeConfig, pool: DeploymentHandle[Any], schedulers: DeploymentHandle[Any]
    ) -> None:
        # Schedulers are reached over sockets; their handle makes them part of the application.
        self._config = config
        self._pool = PoolClient(pool, model_fingerprint(config))

    def __serve_build_asgi_app__(self) -> FastAPI:
        # They take seconds to import, and only routers need them.
        from cluster.api.app import create_app
        from cluster.router.router import Router

        router = Router(router_config(check_on_this_node(self._config)), self._pool)

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            Watchdog(HANG_TIMEOUT).start()
            await router.start()
            yield
            await router.close()

        return create_app(router, lifespan, sends_ids=False)

    def reconfigure(self, live: dict[str, Any]) -> None:
        """Take in the log level of a new configuration."""
        set_log_level(live["log_level"])


def router_deployment(config: ServeConfig) -> Deployment:
    """Return the HTTP face as a deployment."""
    return serve.deployment(
        name="Router",
        num_replicas=config.routers,
        user_config={"log_level": config.log_level},
        max_ongoing_requests=100_000,  # the router's own limits answer 429 with a reason
        max_surge_percent=100,  # an update starts the new ones first
        ray_actor_options={"num_cpus": ONE_CPU},
        graceful_shutdown_timeout_s=config.drain_timeout + 5,
        graceful_shutdown_wait_loop_s=0.2,
        logging_config={"log_level": config.log_level, "enable_access_log": False},
    )(serve.ingress()(RouterReplica))


class SafeRequestIds:
    """Middleware behind which each HTTP request has one id, which a router takes as it is."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with one header for its id."""
        if scope["type"] == "http":
            others = [header for header in scope["headers"] if header[0] != REQUEST_ID_HEADER]
            request_id = safe_id(scope["headers"])
            scope = {**scope, "headers": [*others, (REQUEST_ID_HEADER, request_id.encode())]}
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """Return what Serve is to put around its own middleware, as it asks for it."""
    return [Middleware(SafeRequestIds)]
