"""POST /v1/completions: one prompt or several, as text or as token ids.

Owns the responses' assembly. Knows nothing of schedulers.
"""

from collections.abc import AsyncGenerator, Sequence

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.errors import InvalidRequest
from cluster.router import logprobs
from cluster.router.answer import Piece, TokenLogprob
from cluster.router.completion_call import (
    Call,
    Wanted,
    call_of,
    check_body,
    make_requests,
    with_end,
)
from cluster.router.generation import Generation
from cluster.router.http import body_of, event_stream, read_body, unless_disconnected
from cluster.router.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    sse,
    usage_of,
)
from cluster.router.router import Router
from cluster.router.schemas import CompletionBody
from cluster.router.tokenizer import Tokenizer
from cluster.router.validation import DEFAULT_COMPLETION_TOKENS, prompts


class _Logprobs:
    """The log-probabilities of one prompt's answer, in step with its text."""

    def __init__(self, tokenizer: Tokenizer, wanted: bool) -> None:
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._offset = 0  # characters

    def of(self, entries: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        if not self._wanted:
            return None
        shape, self._offset = logprobs.completion_logprobs(self._tokenizer, entries, self._offset)
        return shape


def _joined(pieces: list[Piece]) -> Piece:
    return Piece(
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
        finish_reason=pieces[-1].finish_reason,
        stop_reason=pieces[-1].stop_reason,
    )


def _choice(
    index: int, piece: Piece, shape: CompletionLogprobs | None, call: Call
) -> CompletionChoice:
    return CompletionChoice(
        index=index,
        text=piece.text,
        logprobs=shape,
        finish_reason=piece.finish_reason,
        stop_reason=piece.stop_reason,
        token_ids=piece.token_ids if call.return_token_ids else UNSET,
    )


async def _whole(
    router: Router, generation: Generation, call: Call, wants_logprobs: bool
) -> Response:
    pieces: list[list[Piece]] = [[] for _ in generation.answers]
    with generation:
        while generation.is_running:
            for index, piece in await generation.receive():
                pieces[index].append(piece)
    choices = []
    for index, answer in enumerate(generation.answers):
        piece = _joined(pieces[index])
        shape = _Logprobs(router.tokenizer, wants_logprobs).of(piece.logprobs)
        choice = _choice(index, piece, shape, call)
        if call.return_token_ids:
            choice.prompt_token_ids = answer.request.token_ids
        choices.append(choice)
    completion = Completion(
        call.id, call.created, call.model, choices, usage=usage_of(generation.answers)
    )
    return Response(msgspec.json.encode(completion), media_type="application/json")


async def _stream(
    router: Router, generation: Generation, call: Call, wants_logprobs: bool
) -> AsyncGenerator[bytes]:
    def chunk(choices: list[CompletionChoice]) -> Completion:
        usage = None if call.include_usage else UNSET
        return Completion(call.id, call.created, call.model, choices, usage=usage)

    shapes = [_Logprobs(router.tokenizer, wants_logprobs) for _ in generation.answers]
    begun: set[int] = set()
    with generation:
        while generation.is_running:
            for index, piece in await generation.receive():
                choice = _choice(index, piece, shapes[index].of(piece.logprobs), call)
                if call.return_token_ids and index not in begun:
                    choice.prompt_token_ids = generation.answers[index].request.token_ids
                begun.add(index)
                yield sse(chunk([choice]))
        if call.include_usage:
            message = chunk([])
            message.usage = usage_of(generation.answers)
            yield sse(message)


async def _prompt_tokens(router: Router, body: CompletionBody) -> list[tuple[int, ...]]:
    tokenized = []
    for prompt in prompts(body.prompt, router.config):
        if isinstance(prompt, str):
            tokenized.append(await router.encode(prompt, body.add_special_tokens is not False))
        else:
            tokenized.append(tuple(prompt))
        if not tokenized[-1]:
            raise InvalidRequest("prompt: it has no tokens", "prompt")
    return tokenized


def completion_routes(router: Router) -> APIRouter:
    """Return the routes of text completions."""
    routes = APIRouter()

    @routes.post("/v1/completions", openapi_extra=body_of(CompletionBody))
    async def create_completion(http: HttpRequest) -> Response:
        principal = router.authenticate(http)
        body = await read_body(http, CompletionBody, router.config.max_body_bytes)
        options = check_body(body)
        model = await router.model(body.model, principal)
        tokenized = await _prompt_tokens(router, body)
        wanted = Wanted(body.max_tokens, DEFAULT_COMPLETION_TOKENS, body.logprobs)
        requests = make_requests(router, http, body, model, tokenized, wanted)
        generation = router.generate(model, requests, options)
        call = call_of("cmpl", http, body)
        wants_logprobs = body.logprobs is not None
        if body.stream:
            events = with_end(_stream(router, generation, call, wants_logprobs))
            return await unless_disconnected(http, event_stream(events))
        return await unless_disconnected(http, _whole(router, generation, call, wants_logprobs))

    return routes
