"""The middleware that Serve puts around all HTTP that reaches a router.

Serve sends each request id back as it came, so it must be safe before Serve sees it.
`deploy.serving.haproxy.environment` names `middlewares` in the environment.
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.http import REQUEST_ID_HEADER, safe_id
from deploy.serving.router.running_calls import CALLS, CountCalls
from deploy.serving.router.tls import demand_certificates


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
    """Return what Serve is to put around its own middleware, as it asks for it.

    It asks right before it starts the server.
    """
    demand_certificates()
    return [Middleware(SafeRequestIds), Middleware(CountCalls, calls=CALLS)]
