"""/v1/messages: conversations in Anthropic's Messages API, and what they count."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.api.auth import Authenticator
from cluster.api.error_handlers import error_response_as
from cluster.api.http import (
    event_stream,
    json_response,
    read_body,
    request_id_of,
    unless_disconnected,
)
from cluster.api.messages.body import MAX_VALUES, CountTokensBody, MessageBody, as_spelled
from cluster.api.messages.events import MessageEvents
from cluster.api.messages.objects import EVENTS, ErrorBody, Message, TokenCount, message_error
from cluster.api.middleware.rate_limits import admission_of, let_in, reserve
from cluster.api.openapi.operation import GENERATION, LOOKUP, Operation, declared
from cluster.api.prepare import prepare_chat
from cluster.api.prompts.conversation import conversation_text, text_tokens
from cluster.api.request_builder import call_of
from cluster.api.tools.message_format import check_tools, template_format
from cluster.errors import InvalidRequest, TopworkError
from cluster.router.generation import Generation
from cluster.router.router import Router
from cluster.router.tenancy.principal import Principal
from cluster.router.tracing.call_trace import note_response_id

MESSAGES = "/v1/messages"
REQUEST_ID_HEADER = "request-id"  # Anthropic's; the other one is there as always


_EXAMPLE = {"model": "smollm2", "messages": [{"role": "user", "content": "Where is Riga?"}]}
_HEADERS = {REQUEST_ID_HEADER: "Anthropic's name for X-Request-Id"}
CREATE = Operation(
    tag="inference",
    summary="Goes on with a conversation, in Anthropic's Messages API.",
    right="model",
    body=MessageBody,
    answer=Message,
    events=EVENTS,
    errors=GENERATION,
    errors_as=ErrorBody,
    headers=_HEADERS,
    example=_EXAMPLE | {"max_tokens": 64},
)
COUNT = Operation(
    tag="inference",
    summary="Counts the tokens of a conversation's prompt.",
    right="model",
    body=CountTokensBody,
    answer=TokenCount,
    errors=LOOKUP,
    errors_as=ErrorBody,
    headers=_HEADERS,
    example=_EXAMPLE,
)


def message_routes(router: Router, keys: Authenticator) -> APIRouter:
    """Return the routes of the Messages API."""
    routes = APIRouter()
    max_bytes = router.config.max_body_bytes

    @routes.post(MESSAGES, openapi_extra=declared(CREATE))
    async def create_message(http: HttpRequest) -> Response:
        async def work() -> Response:
            principal = keys.authenticate(http)
            await let_in(http, router, principal)
            body = await read_body(http, MessageBody, max_bytes, MAX_VALUES)
            await router.apart(body, body.check)
            return await _create(http, router, principal, body)

        return await _answer(http, work)

    @routes.post(f"{MESSAGES}/count_tokens", openapi_extra=declared(COUNT))
    async def count_tokens(http: HttpRequest) -> Response:
        async def work() -> Response:
            principal = keys.authenticate(http)
            body = await read_body(http, CountTokensBody, max_bytes, MAX_VALUES)
            await router.apart(body, body.check)
            await router.models.require(body.model, principal)
            tools = body.tool_use()
            check_tools(template_format(router), tools)
            talk = await router.apart(body, body.conversation)
            text = await conversation_text(router, talk, tools.rendered, {})
            tokens = await text_tokens(router, text, False)
            return json_response(TokenCount(len(tokens)))

        return await _answer(http, work)

    return routes


async def _answer(http: HttpRequest, work: Callable[[], Awaitable[Response]]) -> Response:
    """Return what `work` makes; its errors are in the words of this API."""
    try:
        response = await work()
    except InvalidRequest as error:
        raise as_spelled(error) from None
    response.headers[REQUEST_ID_HEADER] = request_id_of(http)
    return response


def anthropic_error(http: HttpRequest, error: TopworkError) -> Response:
    """Return an error in Anthropic's shape."""
    request_id = request_id_of(http)
    response = error_response_as(message_error(error, request_id), error)
    response.headers[REQUEST_ID_HEADER] = request_id
    return response


async def _create(
    http: HttpRequest, router: Router, principal: Principal, body: MessageBody
) -> Response:
    make_chat = partial(body.chat_body, has_thoughts=bool(router.reasoning_parser))
    chat = await router.apart(body, make_chat)
    prepared = await prepare_chat(router, call_of(http, principal, chat), chat)
    call = prepared.call
    requests = prepared.requests
    admission = await reserve(admission_of(http), requests, is_bounded=True)  # it must say
    generation = router.generate(
        prepared.model, requests, call.text_options, call.arrival, admission=admission
    )
    message_id = f"msg_{call.request_id}"
    note_response_id(message_id)
    events = MessageEvents(
        message_id,
        body.model,
        generation.processors[0],
        prepared.message_format,
    )
    if body.stream:
        reading = _stream(generation, events, request_id_of(http))
        return await unless_disconnected(http, event_stream(reading))
    return await unless_disconnected(http, _whole(generation, events))


async def _whole(generation: Generation, events: MessageEvents) -> Response:
    with generation:
        while generation.is_running:
            await _grow(generation, events)
    return json_response(events.message())


async def _stream(
    generation: Generation, events: MessageEvents, request_id: str
) -> AsyncGenerator[bytes]:
    """Yield a stream's events, those that are here together as one.

    An error after the first event becomes one. An error before the first event is raised: the HTTP
    status can still carry it.
    """
    try:
        with generation:
            while generation.is_running:
                grown = await _grow(generation, events)
                if grown:
                    yield grown
    except TopworkError as error:
        if not events.has_begun:
            raise
        generation.broke_off()
        yield events.fail(error, request_id)


async def _grow(generation: Generation, events: MessageEvents) -> bytes:
    return b"".join([events.grow(delta) for _, delta in await generation.receive()])
