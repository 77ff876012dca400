"""Middleware around all routes: request ids, times of arrival, counts of responses.

Plain ASGI that looks at the beginning of a response only, so that it adds nothing to the cost of a
token.
"""

import re
import time
import uuid
from collections.abc import Iterable

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.router.metrics.request_metrics import OTHER, RouterMetrics

HEADER = b"x-request-id"
MAX_LENGTH = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


def safe_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the id that these headers of a request give, without odd letters, or a new one."""
    given = next((value for name, value in headers if name == HEADER), b"")
    return _UNSAFE.sub("", given.decode("latin-1"))[:MAX_LENGTH] or uuid.uuid4().hex


class RequestContext:
    """Gives each HTTP request an id and notes its arrival; `sends_ids` sends the id back."""

    def __init__(self, app: ASGIApp, sends_ids: bool = True) -> None:
        self._app = app
        self._sends_ids = sends_ids  # false where the server does it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its id in its state, and the response with the id's header."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = safe_id(scope["headers"])
        state = scope.setdefault("state", {})
        state["arrival"] = time.monotonic()
        state["request_id"] = request_id
        state["send_body"] = send
        if not self._sends_ids:
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message["headers"], (HEADER, request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_id)


def send_body_of(scope: Scope) -> Send:
    """Return what sends the rest of a body, once its beginning is on its way.

    Everything around a route that looks at messages looks at the first ones only.
    """
    send_body: Send = scope["state"]["send_body"]
    return send_body


def request_id_of(http: Request) -> str:
    """Return the id that the middleware gave."""
    request_id: str = http.state.request_id
    return request_id


def arrival_of(http: Request) -> float:
    """Return when the first byte of a request was seen, in seconds of `time.monotonic`."""
    arrival: float = http.state.arrival
    return arrival


class CountResponses:
    """Counts responses by route and status; must be inside of what turns exceptions into them."""

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
