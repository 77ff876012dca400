"""The router as a Serve deployment."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from cluster.router.app import create_app
from cluster.router.config import RouterConfig
from cluster.router.router import Router
from deploy.serving.pool import PoolClient


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
