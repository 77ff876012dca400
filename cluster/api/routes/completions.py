"""POST /v1/completions: one prompt or several, as text or as token ids.

Owns the spelling of its messages. Knows nothing of schedulers.
"""

from collections import defaultdict
from collections.abc import Sequence

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.api import logprobs
from cluster.api.choices import choices_of
from cluster.api.completion_call import (
    Call,
    Caller,
    Wanted,
    call_of,
    check_body,
    chosen_model,
    make_requests,
)
from cluster.api.http import body_of, read_body
from cluster.api.request_ids import request_id_of
from cluster.api.response_builder import Choice, stream_response, whole_response
from cluster.api.schemas.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Mould,
    Usage,
    sse,
)
from cluster.errors import InvalidRequest
from cluster.router.output_processor import OutputDelta
from cluster.router.router import Router
from cluster.router.schemas import CompletionBody
from cluster.router.tokenizer import Tokenizer
from cluster.router.validation import DEFAULT_COMPLETION_TOKENS, prompts


class _CompletionForm:
    """Spells the messages of one call of /v1/completions."""

    def __init__(self, tokenizer: Tokenizer, call: Call, shows_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._call = call
        self._shows_logprobs = shows_logprobs
        self._moulds: dict[int, Mould] = {}  # of what a choice grows by, by its index
        self._offsets: defaultdict[int, int] = defaultdict(int)  # characters, by choice

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Completion:
        message = self._message([self._choice(choice) for choice in choices])
        message.usage = usage
        return message

    def event(self, choice: Choice) -> bytes:
        piece, index = choice.piece, choice.index
        if choice.is_first or piece.finish_reason is not None or self._shows_logprobs:
            return sse(self._message([self._choice(choice)]))
        if index not in self._moulds:
            self._moulds[index] = Mould(
                lambda text, ids: self._message([self._more(index, text, ids)])
            )
        return self._moulds[index].cast(piece.text, piece.token_ids)

    def usage_event(self, usage: Usage) -> bytes:
        message = self._message([])
        message.usage = usage
        return sse(message)

    def _more(self, index: int, text: str, token_ids: tuple[int, ...]) -> CompletionChoice:
        piece = OutputDelta(text, token_ids, (), None, None)
        return self._choice(Choice(index, (), piece, is_first=False))

    def _choice(self, choice: Choice) -> CompletionChoice:
        piece, tells_ids = choice.piece, self._call.return_token_ids
        return CompletionChoice(
            index=choice.index,
            text=piece.text,
            logprobs=self._logprobs(choice) if self._shows_logprobs else None,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if tells_ids else UNSET,
            prompt_token_ids=choice.prompt if tells_ids and choice.is_first else UNSET,
        )

    def _message(self, choices: list[CompletionChoice]) -> Completion:
        call = self._call
        usage = None if call.include_usage else UNSET
        return Completion(call.id, call.created, call.model, choices, usage=usage)

    def _logprobs(self, choice: Choice) -> CompletionLogprobs:
        shape, self._offsets[choice.index] = logprobs.completion_logprobs(
            self._tokenizer, choice.piece.logprobs, self._offsets[choice.index]
        )
        return shape


async def _tokens(
    router: Router, prompts: list[str | list[int]], add_special_tokens: bool
) -> list[tuple[int, ...]]:
    tokenized = []
    for prompt in prompts:
        if isinstance(prompt, str):
            tokenized.append(await router.encode(prompt, add_special_tokens))
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
        caller = Caller(router.authenticate(http), request_id_of(http))
        body = await read_body(http, CompletionBody, router.config.max_body_bytes)
        options = check_body(body)
        given = prompts(body.prompt, router.config)
        wanted = Wanted(
            max_tokens=body.max_tokens,
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            num_logprobs=body.logprobs,
            choices=choices_of(body, len(given), router.config),
        )
        model = await chosen_model(router, caller, body)
        tokenized = await _tokens(router, given, body.add_special_tokens is not False)
        requests = make_requests(router, caller, body, model, tokenized, wanted)
        generation = router.generate(model, requests, options)
        call = call_of("cmpl", http, body)
        form = _CompletionForm(router.tokenizer, call, body.logprobs is not None)
        if body.stream:
            return await stream_response(http, generation, form, call.include_usage)
        return await whole_response(http, generation, wanted.choices, form)

    return routes
