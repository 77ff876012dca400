"""The FastAPI application over a router: routes, error shapes, request ids."""

from fastapi import FastAPI
from starlette.types import Lifespan

from cluster.api.request_ids import RequestIds
from cluster.api.response_counts import CountResponses
from cluster.api.routes.adapters import adapter_routes
from cluster.api.routes.chat import chat_routes
from cluster.api.routes.completions import completion_routes
from cluster.api.routes.kv_events import kv_event_routes
from cluster.api.routes.models import model_routes
from cluster.api.routes.operations import operation_routes
from cluster.api.routes.sglang import sglang_routes
from cluster.api.routes.tokenize import tokenize_routes
from cluster.router.error_responses import install
from cluster.router.router import Router


def create_app(
    router: Router, lifespan: Lifespan[FastAPI] | None = None, *, sends_ids: bool = True
) -> FastAPI:
    """Return the application; whoever serves it starts and closes the router.

    `sends_ids` is false where the server sends each request's id back itself, as Serve does.
    """
    app = FastAPI(title="Topwork", version=router.config.version, lifespan=lifespan)
    app.add_middleware(CountResponses, metrics=router.metrics)
    # Outside of what counts: it knows how bodies are sent.
    app.add_middleware(RequestIds, sends=sends_ids)
    install(app)
    for make_routes in (
        chat_routes,
        completion_routes,
        tokenize_routes,
        adapter_routes,
        sglang_routes,
        model_routes,
        operation_routes,
        kv_event_routes,
    ):
        app.include_router(make_routes(router))
    return app
