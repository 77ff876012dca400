"""POST /tokenize, /detokenize, GET /tokenizer_info: the tokenizer as the completions use it."""

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.api.auth import Authenticator
from cluster.api.http import extra_parameters_of, json_response, read_body
from cluster.api.openapi.operation import LOOKUP, Operation, declared
from cluster.api.prompts.conversation import conversation_tokens
from cluster.api.restrictions import check_token_ids
from cluster.api.schemas.requests import ConversationBody, DetokenizeBody, TokenizeBody
from cluster.api.tools.tool_use import tool_use_of
from cluster.errors import InvalidRequest
from cluster.router.bodies.validation import MAX_VALUES_OF_TOKENS
from cluster.router.router import Router
from cluster.router.tenancy.principal import Principal


class Tokens(msgspec.Struct):
    """The response of /tokenize."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None


class Text(msgspec.Struct):
    """The response of /detokenize."""

    prompt: str


TOKENIZE = Operation(
    tag="tokenizer",
    summary="Makes tokens of a prompt or a conversation.",
    right="model",
    body=TokenizeBody,
    answer=Tokens,
    errors=LOOKUP,
    example={"prompt": "Riga is", "return_token_strs": True},
)
DETOKENIZE = Operation(
    tag="tokenizer",
    summary="Makes text of tokens.",
    right="model",
    body=DetokenizeBody,
    answer=Text,
    errors=LOOKUP,
    example={"tokens": [66, 4, 17]},
)
INFO = Operation(
    tag="tokenizer",
    summary="Shows the tokenizer's class, special tokens and chat template.",
    right="any",
    answer=dict[str, Any],
)


async def _check_model(router: Router, name: str | None, principal: Principal) -> None:
    if name is not None:
        await router.models.require(name, principal)


async def _tokens(router: Router, body: TokenizeBody) -> tuple[int, ...]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("either prompt or messages is needed", "prompt")
    tools = tool_use_of(body.tools, None, None)  # which the template may take no notice of
    if body.messages is None:
        for name, value in (
            ("tools", tools.rendered),
            ("chat_template", body.chat_template),
            ("documents", body.documents),
        ):
            if value:
                raise InvalidRequest(f"{name}: only with messages", name)
        return await router.encode(body.prompt or "", body.add_special_tokens is not False)
    talk = ConversationBody(
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
        chat_template=body.chat_template,
        documents=body.documents,
    )
    special = bool(body.add_special_tokens)
    return await conversation_tokens(router, talk, special, tools.rendered)


def tokenize_routes(router: Router, keys: Authenticator) -> APIRouter:
    """Return the routes of the tokenizer."""
    routes = APIRouter()

    @routes.post("/tokenize", openapi_extra=declared(TOKENIZE))
    async def tokenize(http: HttpRequest) -> Response:
        principal = keys.authenticate(http)
        body = await read_body(http, TokenizeBody, router.config.max_body_bytes)
        body.refuse_extras(extras=extra_parameters_of(http))
        await _check_model(router, body.model, principal)
        token_ids = await _tokens(router, body)
        texts = None
        if body.return_token_strs:
            texts = await router.apart(token_ids, router.tokenizer.raw_tokens, token_ids)
        reply = Tokens(len(token_ids), router.config.context_length, token_ids, texts)
        return json_response(reply)

    @routes.post("/detokenize", openapi_extra=declared(DETOKENIZE))
    async def detokenize(http: HttpRequest) -> Response:
        principal = keys.authenticate(http)
        body = await read_body(
            http, DetokenizeBody, router.config.max_body_bytes, MAX_VALUES_OF_TOKENS
        )
        body.refuse_extras(extras=extra_parameters_of(http))
        await _check_model(router, body.model, principal)
        await router.apart(body.tokens, check_token_ids, body.tokens, router.config, "tokens")
        skips = bool(body.skip_special_tokens)
        text = await router.decode(body.tokens, skips)
        return json_response(Text(text))

    @routes.get("/tokenizer_info", openapi_extra=declared(INFO))
    async def tokenizer_info(http: HttpRequest) -> Response:
        keys.authenticate(http)
        return json_response(router.tokenizer.info())

    return routes
