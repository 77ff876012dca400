"""The middleware that makes a trace of each call that a model answers; there only if traces are.

It looks at the beginning of a response and waits for its end, so that it adds nothing to a token.
"""

from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.router.tracing.call_trace import CallTrace, set_current_trace

if TYPE_CHECKING:
    from cluster.router.tracing.tracer import Tracer  # what it needs may not be installed

OPERATIONS = {  # by path, in the words of GenAI's conventions where those have one
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/classify": "classify",
    "/classify": "classify",
    "/v1/score": "score",
    "/score": "score",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
}


class TraceCalls:
    """Gives calls their traces; must be inside of what notes their arrival."""

    def __init__(self, app: ASGIApp, tracer: "Tracer") -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; its span ends with its response, or with what goes on behind it."""
        path = scope.get("path", "")
        operation = OPERATIONS.get(path)
        if scope["type"] != "http" or scope["method"] != "POST" or operation is None:
            await self._app(scope, receive, send)
            return
        trace = CallTrace(operation, scope["state"]["arrival"])
        span = self._tracer.begin(trace, scope["headers"])
        if span is None:
            await self._app(scope, receive, send)
            return
        http: dict[str, str | int] = {"http.request.method": "POST", "http.route": path}

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                http["http.response.status_code"] = message["status"]
            await send(message)

        set_current_trace(trace)
        try:
            await self._app(scope, receive, send_and_note)
        finally:
            trace.when_over(lambda: self._tracer.end(span, trace, http))
