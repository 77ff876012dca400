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

from cluster.errors import InvalidRequest
from cluster.router.errors_http import CLIENT_CLOSED_REQUEST, from_validation

BodyT = TypeVar("BodyT", bound=BaseModel)


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
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A stream of server-sent events whose source is closed when the client goes away."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes]) -> None:
        self._rest = rest
        super().__init__(
            _prepend(first, rest),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; leave no generator suspended behind, however this ends."""
        async with aclosing(self._rest):
            await super().__call__(scope, receive, send)


async def _prepend(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    yield first
    async for part in rest:
        yield part


async def event_stream(events: AsyncGenerator[bytes]) -> EventStream:
    """Wait for the first event, so that an error before it can still set the HTTP status."""
    return EventStream(await anext(events), events)
