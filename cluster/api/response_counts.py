"""Counts HTTP responses by route and status, for those that ask how often callers are refused.

Plain ASGI: it sees the beginning of a response only, so that it adds nothing to the cost of a
token. Owns which routes have a name of their own. Knows nothing of what is asked.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.router.metrics.request_metrics import OTHER, RouterMetrics


class CountResponses:
    """Middleware that counts; it stands inside of whatever makes a response of an exception."""

    def __init__(self, app: ASGIApp, metrics: RouterMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; count its response when it begins, or its failure as 500."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def send_and_count(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                self._metrics.responded(_route_of(scope), message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_and_count)
        except Exception:
            if not has_begun:
                self._metrics.responded(_route_of(scope), 500)
            raise


def _route_of(scope: Scope) -> str:
    """Return the pattern of the route: what callers write into a path names no series."""
    path: str = getattr(scope.get("route"), "path", OTHER)
    return path
