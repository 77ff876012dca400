"""/v1/responses: conversations in OpenAI's Responses API, which are kept for whoever goes on."""

import time

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.api.auth import Authenticator
from cluster.api.http import json_response, query_flag, read_body
from cluster.api.middleware.rate_limits import admission_of, let_in, reading_on, reserve
from cluster.api.openapi.operation import FLAG, GENERATION, LOOKUP, Operation, Parameter, declared
from cluster.api.request_builder import (
    Call,
    Choices,
    GenerationLimits,
    build_requests,
    call_of,
    check_grammar,
    resolve_model,
)
from cluster.api.responses import objects
from cluster.api.responses.body import MAX_VALUES, ResponseBody
from cluster.api.responses.events import ResponseEvents
from cluster.api.responses.items import Turn
from cluster.api.responses.objects import DeletedResponse, Reasoning, Settings
from cluster.api.responses.prompt import Told, prompt_of
from cluster.api.responses.reading import (
    answer_begun,
    answer_claimed,
    answer_ended,
    answer_stream,
    answer_whole,
)
from cluster.api.responses.record import (
    ResponseRecord,
    keep_of,
    new_id,
    packed,
    unknown_response,
)
from cluster.api.responses.stored import StoredResponse, find, whole_conversation
from cluster.api.responses.text import text_settings
from cluster.api.tools.enforced_calls import formed
from cluster.api.tools.message_format import (
    begins_in_thought,
    check_tools,
    format_of,
    template_format,
    template_variables,
)
from cluster.api.tools.thinking_budget import budgeted, thinking_budget
from cluster.errors import InvalidRequest, NotFound, Overloaded, Unavailable
from cluster.router.model_resolver import ResolvedModel
from cluster.router.parser.families import MessageFormat
from cluster.router.router import Router
from cluster.router.tracing.call_trace import note_response_id

PATH = "/v1/responses/{response_id}"
ONE_ANSWER = Choices(1, 1)


CREATE = Operation(
    tag="inference",
    summary="Goes on with a conversation, in OpenAI's Responses API.",
    right="model",
    body=ResponseBody,
    answer=objects.Response,
    events=objects.EVENTS,
    errors=GENERATION,
    example={"model": "smollm2", "input": "Where is Riga?", "max_output_tokens": 64},
)
RETRIEVE = Operation(
    tag="inference",
    summary="Shows a stored response as it is now, or its events.",
    right="any",
    answer=objects.Response,
    events=objects.EVENTS,
    errors=(InvalidRequest, NotFound, Overloaded, Unavailable),
    parameters=(
        Parameter("stream", FLAG, "whether events are wanted"),
        Parameter(
            "starting_after",
            {"type": "integer", "minimum": 0, "maximum": 999_999_999},
            "the number of the last event that the reader has; with stream=true",
        ),
    ),
)
CANCEL = Operation(
    tag="inference",
    summary="Ends a response in the background.",
    right="any",
    answer=objects.Response,
    errors=LOOKUP,
)
DELETE = Operation(
    tag="inference",
    summary="Forgets a stored response, and ends what runs of it.",
    right="any",
    answer=DeletedResponse,
    errors=(NotFound, Unavailable),
)


def response_routes(router: Router, keys: Authenticator) -> APIRouter:
    """Return the routes of the Responses API."""
    routes = APIRouter()

    @routes.post("/v1/responses", openapi_extra=declared(CREATE))
    async def create_response(http: HttpRequest) -> Response:
        principal = keys.authenticate(http)
        await let_in(http, router, principal)
        body = await read_body(http, ResponseBody, router.config.max_body_bytes, MAX_VALUES)
        await router.apart(body, body.check)
        call = call_of(http, principal, body)
        return await _create(http, router, call, body)

    @routes.get(PATH, openapi_extra=declared(RETRIEVE))
    async def retrieve_response(http: HttpRequest, response_id: str) -> Response:
        principal = keys.authenticate(http)
        wants_stream = query_flag(http, "stream")
        after = _starting_after(http, wants_stream)
        stored = await find(router, principal, response_id)
        if not wants_stream:
            return json_response((await stored.followed(router)).response())
        if not stored.has_ended:
            call = await router.kept.claim(response_id)
            if call is None:
                raise unknown_response(response_id)
            stored = StoredResponse(stored.record, call.claimed)
            admission = reading_on(router, principal)
            return await answer_claimed(http, router, call, stored, after, admission)
        return await answer_ended(http, router, stored, after)

    @routes.post(f"{PATH}/cancel", openapi_extra=declared(CANCEL))
    async def cancel_response(http: HttpRequest, response_id: str) -> Response:
        principal = keys.authenticate(http)
        stored = await find(router, principal, response_id)
        if not stored.record.settings.background:
            raise InvalidRequest(
                "Cannot cancel a synchronous response: it ends with its client",
                "response_id",
            )
        if not stored.has_ended:
            stored = await _end(router, stored, forgets=False)
        return json_response((await stored.followed(router)).response())

    @routes.delete(PATH, openapi_extra=declared(DELETE))
    async def delete_response(http: HttpRequest, response_id: str) -> Response:
        principal = keys.authenticate(http)
        stored = await find(router, principal, response_id)
        await _end(router, stored, forgets=True)
        return json_response(DeletedResponse(response_id))

    return routes


async def _create(http: HttpRequest, router: Router, call: Call, body: ResponseBody) -> Response:
    turns = await whole_conversation(router, call.principal, body)
    tools = body.tool_use
    template = template_format(router)
    check_tools(template, tools)
    told = Told(tools.rendered, template_variables(template, body.effort, "reasoning.effort"))
    await check_grammar(router, call)
    model = await resolve_model(router, call)
    prompt, turns = await prompt_of(router, body, turns, told)
    is_open = begins_in_thought(template, prompt.text)
    budget = None
    if body.thinking_token_budget is not None:
        budget = thinking_budget(router, template, body.thinking_token_budget, is_open=is_open)
    message_format = format_of(
        template,
        tools,
        begins_in_thought=is_open,
        shows_reasoning=body.include_reasoning is not False,
    )
    if message_format is not None:
        call = await formed(router, call, template, tools, message_format, prompt.text)
    limits = GenerationLimits(body.max_output_tokens, None, body.num_logprobs, ONE_ANSWER)
    requests = build_requests(router, call, model, [prompt.token_ids], limits)
    if budget is not None:
        requests = [budgeted(choices, budget) for choices in requests]
    record = _record(router, call, body, model, turns, message_format)
    note_response_id(record.id)
    keep = keep_of(record, router.config) if body.is_stored else None
    is_bounded = body.max_output_tokens is not None
    admission = await reserve(admission_of(http), requests, is_bounded=is_bounded)
    generation = router.generate(
        model,
        requests,
        call.text_options,
        call.arrival,
        keep,
        is_by_token=True,
        admission=admission,
    )
    in_background = record.settings.background
    if body.stream:
        events = ResponseEvents(record, router.tokenizer, generation.processors[0])
        return await answer_stream(http, router, generation, events, in_background)
    events = ResponseEvents(record, router.tokenizer, generation.processors[0], after=float("inf"))
    if in_background:
        return await answer_begun(http, router, generation, events)
    return await answer_whole(http, generation, events)


def _record(
    router: Router,
    call: Call,
    body: ResponseBody,
    model: ResolvedModel,
    turns: list[Turn],
    message_format: MessageFormat | None,
) -> ResponseRecord:
    defaults = router.config.sampling_defaults
    settings = Settings(
        model=body.model,
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        previous_response_id=body.previous_response_id,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        store=body.is_stored,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        tool_choice=body.tool_choice or "auto",
        top_logprobs=body.top_logprobs or 0,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
        tools=body.tools if isinstance(body.tools, list) else [],
        reasoning=Reasoning(body.effort),
        text=text_settings(body.text),
    )
    return ResponseRecord(
        id=new_id(),
        created_at=int(time.time()),
        tenant=call.principal.tenant,
        names=model.names,
        options=call.text_options,
        shows_logprobs=body.num_logprobs is not None,
        is_streamed=bool(body.stream),
        settings=settings,
        turns=packed(turns if body.is_stored else [], router.config.max_body_bytes),
        message_format=message_format,
    )


async def _end(router: Router, stored: StoredResponse, *, forgets: bool) -> StoredResponse:
    """End a response of the caller's; return what there is of it."""
    claimed = await router.kept.end(stored.record.id, forgets=forgets)
    if claimed is None:  # it was the oldest, or its time is over
        raise unknown_response(stored.record.id)
    return StoredResponse(stored.record, claimed)


def _starting_after(http: HttpRequest, wants_stream: bool) -> int:
    """Return the number of the last event that the reader has; -1: it has none."""
    text = http.query_params.get("starting_after")
    if text is None:
        return -1
    if not wants_stream:
        raise InvalidRequest("starting_after: only with stream=true", "starting_after")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidRequest("starting_after: must be the number of an event", "starting_after")
    return int(text)
