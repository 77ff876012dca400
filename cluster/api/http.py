"""The HTTP that all calls have in common: bodies, clients that go away, server-sent events.

Knows nothing of models or schedulers.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.api.request_ids import send_body_of
from cluster.errors import InvalidRequest
from cluster.router.error_responses import CLIENT_CLOSED_REQUEST, from_validation

BodyT = TypeVar("BodyT", bound=BaseModel)
T = TypeVar("T")


async def read_body(http: Request, model: type[BodyT], max_bytes: int) -> BodyT:
    """Return the JSON body as a model.

    Raises:
        InvalidRequest: if it is too large, not JSON, or not what the model takes.
    """
    data = bytearray()
    async for part in http.stream():
        data += part
        if len(data) > max_bytes:
            raise InvalidRequest(f"the body is over the limit of {max_bytes} bytes")
    try:
        return model.model_validate_json(bytes(data))
    except ValidationError as error:
        raise from_validation(error) from None


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return what an OpenAPI document says of a body that `read_body` reads."""
    schema = model.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return a schema with definitions in place of what refers to them; none is within itself.

    A reference counts from the root of the document, where the definitions of a body are not.
    """
    if isinstance(schema, list):
        return [_inlined(one, definitions) for one in schema]
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref")
    if reference is not None:
        return _inlined(definitions[reference.rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}


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
            await _unless_disconnected(receive, self._send(send, send_body_of(scope)))

    async def _send(self, send: Send, send_body: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for part in self._rest:
            await send_body({"type": "http.response.body", "body": part, "more_body": True})
        await send_body({"type": "http.response.body", "body": b"", "more_body": False})


async def event_stream(events: AsyncGenerator[bytes]) -> EventStream:
    """Wait for the first event, so that an error before it can still set the HTTP status."""
    return EventStream(await anext(events), events)
