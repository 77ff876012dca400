"""The FastAPI application over a router: its routes, middleware and error responses."""

from fastapi import FastAPI
from starlette.types import Lifespan

from cluster.api.auth import Authenticator
from cluster.api.error_handlers import add_error_handlers, unexpected_response
from cluster.api.http import CountResponses, RequestContext
from cluster.api.middleware.body_timeout import BodyTimeout
from cluster.api.middleware.rate_limits import RateLimits
from cluster.api.middleware.request_log import LogRequests
from cluster.api.middleware.token_keys import FreshTokenKeys
from cluster.api.middleware.tracing import TraceCalls
from cluster.api.middleware.turns import TakeTurns
from cluster.api.middleware.unexpected import CatchUnexpected
from cluster.api.middleware.web_pages import RefuseStrangers
from cluster.api.openapi.document import openapi_document
from cluster.api.routes.admin.adapters import adapter_routes
from cluster.api.routes.admin.kv_events import kv_event_routes
from cluster.api.routes.admin.operations import operation_routes
from cluster.api.routes.admin.uploads import upload_routes
from cluster.api.routes.chat import chat_routes
from cluster.api.routes.completions import completion_routes
from cluster.api.routes.documents import document_routes
from cluster.api.routes.invocations import invocation_routes
from cluster.api.routes.messages import MESSAGES, anthropic_error, message_routes
from cluster.api.routes.models import model_routes
from cluster.api.routes.pooling.classify import classify_routes
from cluster.api.routes.pooling.embeddings import embedding_routes
from cluster.api.routes.pooling.score import score_routes
from cluster.api.routes.render import render_routes
from cluster.api.routes.response_inputs import response_input_routes
from cluster.api.routes.responses import response_routes
from cluster.api.routes.sglang import SGLANG_PATHS, sglang_error, sglang_routes
from cluster.api.routes.streams import stream_routes
from cluster.api.routes.tokenize import tokenize_routes
from cluster.api.schemas.extras import ExtraParameters
from cluster.router.router import Router


def create_app(
    router: Router, lifespan: Lifespan[FastAPI] | None = None, *, sends_ids: bool = True
) -> FastAPI:
    """Return the application; whoever serves it starts and closes the router.

    `sends_ids` is false where the server sends each request's id back itself, as Serve does.
    """
    app = FastAPI(
        title="Topwork",
        version=router.config.version,
        lifespan=lifespan,
        openapi_url=None,  # with keys it needs one: see document_routes
    )
    app.state.bodies = router.bodies
    app.state.extra_parameters = ExtraParameters(router.config.lenient_parameters)
    shapes = dict.fromkeys(SGLANG_PATHS, sglang_error) | {MESSAGES: anthropic_error}
    app.add_middleware(CatchUnexpected, respond=unexpected_response(shapes))
    if router.tokens is not None:
        app.add_middleware(FreshTokenKeys, tokens=router.tokens)
    app.add_middleware(RateLimits)
    hosts, origins = router.config.allowed_hosts, router.config.allowed_origins
    if origins is not None:
        app.add_middleware(RefuseStrangers, hosts=hosts, origins=origins)
    app.add_middleware(CountResponses, metrics=router.metrics)
    if router.tracer is not None:
        app.add_middleware(TraceCalls, tracer=router.tracer)
    app.add_middleware(BodyTimeout, seconds=router.config.body_timeout)
    if router.request_log is not None:
        app.add_middleware(
            LogRequests,
            log=router.request_log,
            router=router.router_id,
            has_content=router.config.request_log_content,
        )
    app.add_middleware(TakeTurns)
    # Outside of what counts: it knows how bodies are sent, and when calls have come.
    app.add_middleware(RequestContext, sends_ids=sends_ids)
    add_error_handlers(app, shapes, sends_ids=sends_ids)
    keys = Authenticator(router)
    routers = [
        make_routes(router, keys)
        for make_routes in (
            chat_routes,
            completion_routes,
            response_routes,
            response_input_routes,
            embedding_routes,
            classify_routes,
            score_routes,
            message_routes,
            stream_routes,
            tokenize_routes,
            render_routes,
            adapter_routes,
            sglang_routes,
            upload_routes,
            model_routes,
            operation_routes,
            kv_event_routes,
        )
    ]
    routers.append(invocation_routes(router, keys, routers))
    for one in routers:
        app.include_router(one)
    document = openapi_document(
        app,
        routers,
        has_keys=keys.are_on,
        may_forbid=keys.may_forbid,
        refuses_pages=origins is not None,
        is_lenient=router.config.lenient_parameters,
    )
    app.openapi = lambda: document  # type: ignore[method-assign]
    app.include_router(document_routes(app.title, document, keys))
    return app
