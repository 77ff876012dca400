"""Request ids that are safe before Serve sees them, for it sends each one back as it came.

Serve puts what `middlewares` returns around all HTTP that reaches a router; its environment names
it (`deploy.serving.haproxy`). What makes an id safe is the router's to say. Knows nothing of Ray.
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.request_ids import HEADER, safe_id


class SafeRequestIds:
    """Middleware behind which each HTTP request has one id, which a router takes as it is."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with one header for its id."""
        if scope["type"] == "http":
            others = [header for header in scope["headers"] if header[0] != HEADER]
            request_id = safe_id(scope["headers"])
            scope = {**scope, "headers": [*others, (HEADER, request_id.encode())]}
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """Return what Serve is to put around its own middleware, as it asks for it."""
    return [Middleware(SafeRequestIds)]
