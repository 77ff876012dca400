"""Request ids: taken from X-Request-Id as far as that is harmless, made otherwise, and sent back.

Plain ASGI, so that it adds nothing to the cost of a token. Knows nothing of what is asked.
"""

import re
import uuid
from collections.abc import Iterable

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
MAX_LENGTH = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


def safe_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the id that these headers of a request give, without odd letters, or a new one."""
    given = next((value for name, value in headers if name == HEADER), b"")
    return _UNSAFE.sub("", given.decode("latin-1"))[:MAX_LENGTH] or uuid.uuid4().hex


class RequestIds:
    """Middleware that gives each HTTP request an id; `sends` it back, unless its server does."""

    def __init__(self, app: ASGIApp, sends: bool = True) -> None:
        self._app = app
        self._sends = sends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with an id in its state, and the response with the id's header."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = safe_id(scope["headers"])
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["send_body"] = send
        if not self._sends:
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
