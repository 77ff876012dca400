"""POST /invocations: SageMaker's one route, which answers what a body asks for."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, cast

import msgspec
from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, RootModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Receive

from cluster.api.auth import Authenticator
from cluster.api.error_handlers import ErrorReply
from cluster.api.http import bodies_of, read_bytes
from cluster.api.openapi.operation import GENERATION, OF_STREAMS, Operation, declared
from cluster.api.schemas.embeddings import EmbeddingBody
from cluster.api.schemas.requests import ChatBody, CompletionBody
from cluster.api.schemas.responses import ChatChunk, Completion
from cluster.errors import InvalidRequest
from cluster.router.bodies.reader import SMALL_BODY
from cluster.router.bodies.validation import MAX_VALUES_OF_TOKENS
from cluster.router.router import Router

Present = Annotated[bool, BeforeValidator(lambda _: True)]
Endpoint = Callable[[HttpRequest], Awaitable[Response]]

# The first that a body has all of is what it asks for.
_CALLS: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"prompt"}), "/v1/completions"),
    (frozenset({"input"}), "/v1/embeddings"),
    (frozenset({"messages", "encoding_format"}), "/v1/embeddings"),
    (frozenset({"messages"}), "/v1/chat/completions"),
)


class InvocationBody(RootModel[ChatBody | CompletionBody | EmbeddingBody]):
    """POST /invocations: the body of a chat, a completion or a call for embeddings."""


INVOCATION = Operation(
    tag="inference",
    summary="Answers a chat, a completion or a call for embeddings, as SageMaker asks for them.",
    right="model",
    body=InvocationBody,
    answer=dict[str, Any],
    events=(ChatChunk, Completion, ErrorReply),
    errors=GENERATION,
    headers=OF_STREAMS,
    example={"model": "smollm2", "prompt": "Riga is", "max_tokens": 16},
)


def path_of(names: frozenset[str]) -> str:
    """Return the path that a body with these keys is for.

    Raises:
        InvalidRequest: if it is for none.
    """
    for needed, path in _CALLS:
        if needed <= names:
            return path
    raise InvalidRequest("the body has none of messages, prompt and input")


class _Keys(BaseModel):
    """Which of the keys that matter a body has."""

    messages: Present = False
    prompt: Present = False
    input: Present = False
    encoding_format: Present = False


async def _keys_of(http: HttpRequest, data: bytearray) -> frozenset[str]:
    """Return the keys of a body, as far as they matter."""
    if len(data) > SMALL_BODY:
        found = await bodies_of(http).read(data, _Keys, MAX_VALUES_OF_TOKENS)
        return frozenset(found.model_fields_set)
    try:
        return frozenset(msgspec.json.decode(data, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is no JSON object: {error}"[:500]) from None


def _again(data: bytearray, receive: Receive) -> Receive:
    """Return a source of messages that begins with a body that has been read."""
    parts: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

    async def from_start() -> Message:
        return parts.pop() if parts else await receive()

    return from_start


def invocation_routes(
    router: Router, keys: Authenticator, routers: Sequence[APIRouter]
) -> APIRouter:
    """Return the route; `routers` have the routes that answer."""
    routes = APIRouter()
    endpoints: Mapping[str, Endpoint] = {
        route.path: cast(Endpoint, route.endpoint)
        for one in routers
        for route in one.routes
        if isinstance(route, APIRoute)
    }

    @routes.post("/invocations", openapi_extra=declared(INVOCATION))
    async def invoke(http: HttpRequest) -> Response:
        keys.authenticate(http)
        data = await read_bytes(http, router.config.max_body_bytes)
        path = path_of(await _keys_of(http, data))
        return await endpoints[path](HttpRequest(http.scope, _again(data, http.receive)))

    return routes
