"""The HTTP that all routes have in common: middleware, bodies, pages of lists, server-sent events.

The middleware is plain ASGI around all routes: request ids, times of arrival, counts of responses.
It looks at the beginning of a response only, so that it adds nothing to the cost of a token.
"""

import asyncio
import re
import time
import uuid
from bisect import bisect_right
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.adapters.records import AdapterRecord
from cluster.api.error_handlers import CLIENT_CLOSED_REQUEST
from cluster.api.reader_watch import ReaderWatch
from cluster.api.schemas.extras import ExtraParameters
from cluster.errors import InvalidRequest
from cluster.router.bodies.reader import SMALL_BODY, BodyReader
from cluster.router.bodies.room import BodyRoom
from cluster.router.bodies.validation import MAX_VALUES, BodyT
from cluster.router.metrics.request_metrics import OTHER, RouterMetrics

MAX_LIMIT = 10_000  # entries of one page
MAX_FORWARDED = 1024  # characters of a header that anyone can send
SSE_DONE = b"data: [DONE]\n\n"
JSON = "application/json"
REQUEST_ID_HEADER = b"x-request-id"
MAX_REQUEST_ID_LENGTH = 64
_CLAIM = "body_claim"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")  # in a request id
T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


async def read_body(
    http: Request, model: type[BodyT], max_bytes: int, max_values: int = MAX_VALUES
) -> BodyT:
    """Return the JSON body as a model.

    `max_values` is of lists, objects and what is in them: to make millions takes seconds.

    Raises:
        InvalidRequest: if it is too large, not JSON, or not what the model takes.
        Overloaded: if too many large ones are being read.
    """
    data = await read_bytes(http, max_bytes)
    return await bodies_of(http).read(data, model, max_values)


async def read_bytes(http: Request, max_bytes: int) -> bytearray:
    """Return a body that is JSON, as far as its type says.

    A large one has a part of the router's room until its answer begins.

    Raises:
        InvalidRequest: if it is too large, or of another type.
        Overloaded: if it is large, and too many such are being read; nothing of it is read then.
    """
    _check_content_type(http)
    claim = _claim_of(http)
    announced = announced_size(http)
    if announced is not None:
        _check_size(announced, max_bytes)
        claim.check(announced)
    data = bytearray()
    async for part in http.stream():
        data += part
        _check_size(len(data), max_bytes)
        claim.grow(len(data))
    return data


def announced_size(http: Request) -> int | None:
    """Return how many bytes a body is said to have, if that is said."""
    length = http.headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 19 else None


def forwarded_for(headers: Headers) -> str | None:
    """Return what proxies say of the client; the last address is the nearest proxy's word."""
    return ", ".join(headers.getlist("x-forwarded-for"))[-MAX_FORWARDED:] or None


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise InvalidRequest(f"the body is over the limit of {max_bytes} bytes")


class BodyClaim:
    """What one call holds of its router's room for large bodies."""

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._num_bytes = 0

    def check(self, num_bytes: int) -> None:
        """Raise Overloaded if a body of this size would not fit beside the others now."""
        if num_bytes > max(SMALL_BODY, self._num_bytes):
            self._room.check(num_bytes - self._num_bytes)

    def grow(self, num_bytes: int) -> None:
        """Hold a body of this size, of which this is all so far; raises as `check`."""
        if num_bytes > max(SMALL_BODY, self._num_bytes):
            self._room.take(num_bytes - self._num_bytes)
            self._num_bytes = num_bytes

    def end(self) -> None:
        """Hold nothing any more."""
        self._room.give_back(self._num_bytes)
        self._num_bytes = 0


def _claim_of(http: Request) -> BodyClaim:
    """Return what a call holds, the same however often its body is read."""
    state = http.scope["state"]
    if _CLAIM not in state:
        state[_CLAIM] = BodyClaim(bodies_of(http).room)
    claim: BodyClaim = state[_CLAIM]
    return claim


def _end_claim(scope: Scope) -> None:
    """Let go of a call's body: its answer has begun, or it is over."""
    claim: BodyClaim | None = scope["state"].pop(_CLAIM, None)
    if claim is not None:
        claim.end()


def bodies_of(http: Request) -> BodyReader:
    """Return what makes the bodies of a router's calls into models."""
    bodies: BodyReader = http.app.state.bodies
    return bodies


def _check_content_type(http: Request) -> None:
    """Raise InvalidRequest for a body that says to be no JSON, as a form of a web page does."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and kind != JSON and not kind.endswith("+json"):
        raise InvalidRequest(f"Content-Type: must be {JSON}, not {kind[:100]!r}", "Content-Type")


@dataclass(frozen=True, slots=True)
class PageQuery:
    """What a caller wants to see of a listing, with OpenAI's cursor; without a limit, all."""

    limit: int | None
    after: str  # the name before the first entry; "": from the start

    def cut(self, records: Sequence[AdapterRecord]) -> tuple[Sequence[AdapterRecord], bool]:
        """Return (the entries of this page, whether there are more) of what is ordered by name."""
        begin = bisect_right(records, self.after, key=lambda record: record.name)
        end = len(records) if self.limit is None else begin + self.limit
        return records[begin:end], end < len(records)


def page_query(http: Request) -> PageQuery:
    """Return the page that a query string asks for.

    Raises:
        InvalidRequest: if `limit` is no number in range.
    """
    limit = http.query_params.get("limit")
    if limit is not None and not (
        limit.isascii() and limit.isdigit() and len(limit) < 10 and 1 <= int(limit) <= MAX_LIMIT
    ):
        raise InvalidRequest(f"limit: must be a number from 1 to {MAX_LIMIT}", "limit")
    return PageQuery(None if limit is None else int(limit), http.query_params.get("after", ""))


def query_flag(http: Request, name: str) -> bool:
    """Return whether a query string switches something on; without it, it is off.

    Raises:
        InvalidRequest: if it says neither.
    """
    value = http.query_params.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name}: must be true or false", name)
    return value in ("true", "1")


def json_response(body: object, status: int = 200) -> Response:
    """Return a message as a JSON response."""
    return Response(_encode(body), status, media_type=JSON)


async def unless_disconnected(http: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the response that `work` makes; cancel `work` if the client goes away first.

    The body must have been read.
    """
    response = await _unless_disconnected(http.receive, work)
    return Response(status_code=CLIENT_CLOSED_REQUEST) if response is None else response


async def _unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def sse(message: object) -> bytes:
    """Return a message as one server-sent event."""
    return b"data: " + _encode(message) + b"\n\n"


class EventStream(StreamingResponse):
    """A stream of server-sent events whose source is closed when the client goes away."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes]) -> None:
        self._first = first
        self._rest = rest
        super().__init__(
            rest,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; leave no generator suspended behind, however this ends."""
        async with aclosing(self._rest):
            await _unless_disconnected(receive, self._send(send, scope))

    async def _send(self, send: Send, scope: Scope) -> None:
        send_body = send_body_of(scope)
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        watch = ReaderWatch(scope["state"]["request_id"])
        try:
            async for part in self._rest:
                watch.turn += 1
                await send_body({"type": "http.response.body", "body": part, "more_body": True})
                watch.turn += 1
            await send_body({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if not watch.has_ended:
                raise
        finally:
            watch.stop()


async def event_stream(events: AsyncGenerator[bytes], stream_id: str | None = None) -> EventStream:
    """Wait for the first event, so that an error before it can still set the HTTP status.

    `stream_id` is of a stream that can be read on, for its header.
    """
    response = EventStream(await anext(events), events)
    if stream_id is not None:
        response.headers["x-stream-id"] = stream_id
    return response


def safe_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the id that these headers of a request give, without odd letters, or a new one."""
    given = next((value for name, value in headers if name == REQUEST_ID_HEADER), b"")
    return _UNSAFE.sub("", given.decode("latin-1"))[:MAX_REQUEST_ID_LENGTH] or uuid.uuid4().hex


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
                headers = [*message["headers"], (REQUEST_ID_HEADER, request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_id)


def send_body_of(scope: Scope) -> Send:
    """Return what sends the rest of a body, once its beginning is on its way.

    Everything around a route that looks at messages looks at the first ones only.
    """
    send_body: Send = scope["state"]["send_body"]
    return send_body


def extra_parameters_of(http: Request) -> ExtraParameters:
    """Return what decides about parameters that are unknown or not supported."""
    extras: ExtraParameters = http.app.state.extra_parameters
    return extras


def request_id_of(http: Request) -> str:
    """Return the id that the middleware gave."""
    request_id: str = http.state.request_id
    return request_id


def arrival_of(http: Request) -> float:
    """Return when the first byte of a request was seen, in seconds of `time.monotonic`."""
    arrival: float = http.state.arrival
    return arrival


class CountResponses:
    """Counts responses by route and status; must be inside of what turns exceptions into them.

    Also ends what calls hold of the room for bodies: once its answer begins, a body is done with.
    """

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
                _end_claim(scope)
                self._metrics.responded(route_of(scope), message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_and_count)
        except Exception:
            if not has_begun:
                self._metrics.responded(route_of(scope), 500)
            raise
        finally:
            _end_claim(scope)


def route_of(scope: Scope) -> str:
    """Return the pattern of the route: what callers write into a path names no series."""
    path: str = getattr(scope.get("route"), "path", OTHER)
    return path
