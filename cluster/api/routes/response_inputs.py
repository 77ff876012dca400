"""What goes into responses: the items of a stored one, and the tokens that an input would have."""

from typing import Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.api.auth import Authenticator
from cluster.api.http import json_response, read_body
from cluster.api.openapi.operation import LOOKUP, Operation, Parameter, declared
from cluster.api.request_builder import call_of
from cluster.api.responses.body import MAX_VALUES, ResponseBody
from cluster.api.responses.input_items import (
    DEFAULT_LIMIT,
    MAX_LIMIT,
    InputItemList,
    Order,
    input_items,
    page_of,
)
from cluster.api.responses.prompt import Told, prompt_of
from cluster.api.responses.stored import find, whole_conversation
from cluster.api.tools.message_format import check_tools, template_format, template_variables
from cluster.errors import Conflict, InvalidRequest, Overloaded
from cluster.router.router import Router


class InputTokens(msgspec.Struct):
    """How many tokens an input has."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


COUNT = Operation(
    tag="inference",
    summary="Counts the tokens that a response would have as its input.",
    right="model",
    body=ResponseBody,
    answer=InputTokens,
    errors=(*LOOKUP, Conflict, Overloaded),
    example={"model": "smollm2", "input": "Where is Riga?"},
)
LIST = Operation(
    tag="inference",
    summary="Lists the input of a stored response.",
    right="any",
    answer=InputItemList,
    errors=LOOKUP,
    parameters=(
        Parameter(
            "limit",
            {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT},
            f"items of a page; {DEFAULT_LIMIT}",
        ),
        Parameter("order", {"type": "string", "enum": ["asc", "desc"]}, "desc: the last one first"),
        Parameter("after", {"type": "string"}, "the id of the item before the page"),
    ),
)


def response_input_routes(router: Router, keys: Authenticator) -> APIRouter:
    """Return the routes of the inputs of responses."""
    routes = APIRouter()

    @routes.post("/v1/responses/input_tokens", openapi_extra=declared(COUNT))
    async def count_input_tokens(http: HttpRequest) -> Response:
        principal = keys.authenticate(http)
        body = await read_body(http, ResponseBody, router.config.max_body_bytes, MAX_VALUES)
        await router.apart(body, body.check)
        call_of(http, principal, body)
        turns = await whole_conversation(router, principal, body)
        template, tools = template_format(router), body.tool_use
        check_tools(template, tools)
        told = Told(tools.rendered, template_variables(template, body.effort, "reasoning.effort"))
        await router.models.require(body.model, principal)
        prompt, _ = await prompt_of(router, body, turns, told)
        return json_response(InputTokens(len(prompt.token_ids)))

    @routes.get("/v1/responses/{response_id}/input_items", openapi_extra=declared(LIST))
    async def list_input_items(http: HttpRequest, response_id: str) -> Response:
        principal = keys.authenticate(http)
        limit, order = _limit(http), _order(http)
        stored = await find(router, principal, response_id)
        items = input_items(response_id, stored.record.conversation())
        return json_response(page_of(items, limit, order, http.query_params.get("after")))

    return routes


def _limit(http: HttpRequest) -> int:
    text = http.query_params.get("limit")
    if text is None:
        return DEFAULT_LIMIT
    if text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= MAX_LIMIT:
        return int(text)
    raise InvalidRequest(f"limit: must be a number from 1 to {MAX_LIMIT}", "limit")


def _order(http: HttpRequest) -> Order:
    match http.query_params.get("order", "desc"):
        case "asc":
            return "asc"
        case "desc":
            return "desc"
    raise InvalidRequest("order: must be asc or desc", "order")
