"""What a call would be: its prompts and how their answers would be drawn; nothing is computed.

Owns the shape, which is what vLLM gives to whoever tokenizes apart from where it generates.
"""

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.api.auth import Authenticator
from cluster.api.http import json_response, read_body
from cluster.api.openapi.operation import PREPARATION, Operation, declared
from cluster.api.prepare import PreparedCall, prepare_chat, prepare_completion
from cluster.api.request_builder import call_of
from cluster.api.schemas.requests import ChatBody, CompletionBody
from cluster.request import Request
from cluster.router.bodies.validation import MAX_VALUES_OF_TOKENS
from cluster.router.router import Router


class RenderedSampling(msgspec.Struct):
    """How an answer is drawn and where it ends, in vLLM's words."""

    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int  # 0: all tokens
    min_p: float
    seed: int | None  # None: one is drawn for each call
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float] | None
    logprobs: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]  # with the model's own, unless they are to be ignored
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    structured_outputs: dict[str, str] | None  # the grammar that masks are computed from
    thinking_token_budget: int | None


class RenderedCall(msgspec.Struct):
    """What would be generated for one prompt."""

    request_id: str
    prompt: str
    token_ids: tuple[int, ...]
    sampling_params: RenderedSampling
    model: str
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int
    features: None = None  # of images and sounds


CHAT = Operation(
    tag="tokenizer",
    summary="Shows what a call of /v1/chat/completions would be.",
    right="model",
    body=ChatBody,
    answer=RenderedCall,
    errors=PREPARATION,
    example={"model": "smollm2", "messages": [{"role": "user", "content": "Where is Riga?"}]},
)
COMPLETION = Operation(
    tag="tokenizer",
    summary="Shows what a call of /v1/completions would be, for each prompt.",
    right="model",
    body=CompletionBody,
    answer=list[RenderedCall],
    errors=PREPARATION,
    example={"model": "smollm2", "prompt": ["Riga is", "Tallinn is"]},
)


def render_routes(router: Router, keys: Authenticator) -> APIRouter:
    """Return the routes that show calls of both kinds."""
    routes = APIRouter()
    max_bytes = router.config.max_body_bytes

    @routes.post("/v1/chat/completions/render", openapi_extra=declared(CHAT))
    async def render_chat_completion(http: HttpRequest) -> Response:
        principal = keys.authenticate(http)
        body = await read_body(http, ChatBody, max_bytes)
        prepared = await prepare_chat(router, call_of(http, principal, body), body)
        (rendered,) = await _rendered(router, prepared, "chatcmpl")
        return json_response(rendered)

    @routes.post("/v1/completions/render", openapi_extra=declared(COMPLETION))
    async def render_completion(http: HttpRequest) -> Response:
        principal = keys.authenticate(http)
        body = await read_body(http, CompletionBody, max_bytes, MAX_VALUES_OF_TOKENS)
        prepared = await prepare_completion(router, call_of(http, principal, body), body)
        return json_response(await _rendered(router, prepared, "cmpl"))

    return routes


async def _rendered(router: Router, prepared: PreparedCall, prefix: str) -> list[RenderedCall]:
    """Return what each prompt of a call would be."""
    firsts = [choices[0] for choices in prepared.requests]

    def texts() -> list[str]:
        return [router.tokenizer.decode(first.token_ids, False) for first in firsts]

    body = prepared.call.body
    options = body.stream_options
    return [
        RenderedCall(
            request_id=f"{prefix}-{prepared.call.request_id}",
            prompt=text,
            token_ids=first.token_ids,
            sampling_params=_sampling(prepared, first),
            model=body.model,
            stream=bool(body.stream),
            stream_options=None if options is None else options.model_dump(exclude_none=True),
            cache_salt=body.cache_salt,
            priority=first.priority,
        )
        for first, text in zip(firsts, await asyncio.to_thread(texts), strict=True)
    ]


def _sampling(prepared: PreparedCall, request: Request) -> RenderedSampling:
    body, options, drawn = prepared.call.body, prepared.call.text_options, request.sampling
    return RenderedSampling(
        n=prepared.limits.choices.n,
        max_tokens=request.max_tokens,
        min_tokens=drawn.min_tokens,
        temperature=drawn.temperature,
        top_p=drawn.top_p,
        top_k=drawn.top_k,
        min_p=drawn.min_p,
        seed=body.seed,
        presence_penalty=drawn.presence_penalty,
        frequency_penalty=drawn.frequency_penalty,
        repetition_penalty=drawn.repetition_penalty,
        logit_bias=dict(drawn.logit_bias) or None,
        logprobs=prepared.limits.num_logprobs,
        stop=options.stops,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        include_stop_str_in_output=options.include_stop,
        skip_special_tokens=options.skip_special_tokens,
        structured_outputs={"grammar": drawn.grammar} if drawn.grammar else None,
        thinking_token_budget=None if drawn.thinking is None else drawn.thinking.num_tokens,
    )
