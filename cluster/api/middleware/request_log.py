"""The middleware that has each call in the request log; there only if there is one.

It looks at the beginning of a response and waits for its end, so that it adds nothing to a token.
"""

import time
from collections.abc import Iterable
from datetime import UTC, datetime

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.http import forwarded_for, route_of
from cluster.router.request_log.entry import MAX_TEXT, RequestEntry, set_current_entry
from cluster.router.request_log.writer import RequestLog

# Probes, scrapes and pages of the API, which come again and again and ask nothing.
NOT_LOGGED = frozenset(
    {"/health", "/ready", "/ping", "/version", "/metrics", "/docs", "/redoc", "/openapi.json"}
)


class LogRequests:
    """Writes the line of each call when its answer has ended, or what goes on behind it."""

    def __init__(self, app: ASGIApp, log: RequestLog, router: str, *, has_content: bool) -> None:
        self._app = app
        self._log = log
        self._router = router
        self._has_content = has_content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; note how its response begins."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        entry = self._entry(scope)

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                entry.is_stream = _is_stream(message["headers"])
            await send(message)

        set_current_entry(entry)
        try:
            await self._app(scope, receive, send_and_note)
        except BaseException as error:
            entry.cut(error)
            if isinstance(error, Exception) and entry.error is None:
                entry.error = type(error).__name__
                entry.status = entry.status or 500
            raise
        finally:
            entry.route = route_of(scope)
            if entry.route not in NOT_LOGGED:
                entry.when_over(lambda: self._end(entry))

    def _end(self, entry: RequestEntry) -> None:
        entry.end = time.monotonic()
        self._log.put(entry)

    def _entry(self, scope: Scope) -> RequestEntry:
        state, client = scope["state"], scope.get("client")
        return RequestEntry(
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            arrival=state["arrival"],
            router=self._router,
            request_id=state["request_id"],
            method=scope["method"][:MAX_TEXT],
            client=None if client is None else client[0][:MAX_TEXT],
            forwarded_for=forwarded_for(Headers(scope=scope)),
            has_content=self._has_content,
        )


def _is_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in headers
    )
