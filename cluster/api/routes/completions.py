"""POST /v1/completions: prompts as text or as token ids, and the spelling of their response."""

from collections import defaultdict
from collections.abc import Sequence

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.api.auth import KeyRing
from cluster.api.http import openapi_body, read_body, sse
from cluster.api.prepare import prepare_completion
from cluster.api.request_builder import (
    call_of,
)
from cluster.api.response_builder import (
    LOGPROB_FLOOR,
    Choice,
    ChunkTemplate,
    ResponseMetadata,
    full_response,
    metadata_of,
    stream_response,
)
from cluster.api.resumable import keep_of
from cluster.api.schemas.requests import CompletionBody
from cluster.api.schemas.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
)
from cluster.router.output_processor import CompletionOutput, TokenLogprob
from cluster.router.router import Router
from cluster.router.tokenizer import Tokenizer


def completion_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob], offset: int
) -> tuple[CompletionLogprobs, int]:
    """Return the shape of /v1/completions, and the offset after its tokens.

    Offsets count the tokens' own texts, so that they stay in step with `tokens`.
    """
    shape = CompletionLogprobs([], [], [], [])
    for entry in entries:
        text = tokenizer.token_text(entry.token_id)
        shape.text_offset.append(offset)
        shape.token_logprobs.append(max(entry.logprob, LOGPROB_FLOOR))
        shape.tokens.append(text)
        best = ((entry.token_id, entry.logprob), *entry.top)
        shape.top_logprobs.append(
            {
                tokenizer.token_text(token_id): max(logprob, LOGPROB_FLOOR)
                for token_id, logprob in best
            }
        )
        offset += len(text)
    return shape, offset


class CompletionResponseBuilder:
    """Spells the messages of one call of /v1/completions."""

    def __init__(
        self, tokenizer: Tokenizer, metadata: ResponseMetadata, shows_logprobs: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._metadata = metadata
        self._shows_logprobs = shows_logprobs
        self._templates: dict[int, ChunkTemplate] = {}  # of what a choice grows by, by its index
        self._offsets: defaultdict[int, int] = defaultdict(int)  # characters, by choice

    def full_response(self, choices: Sequence[Choice], usage: Usage) -> Completion:
        message = self._message([self._choice(choice) for choice in choices])
        message.usage = usage
        return message

    def chunk(self, choice: Choice) -> bytes:
        delta, index = choice.output, choice.index
        if choice.is_first or delta.finish_reason is not None or self._shows_logprobs:
            return sse(self._message([self._choice(choice)]))
        if index not in self._templates:
            self._templates[index] = ChunkTemplate(
                lambda text, ids: self._message([self._next_choice(index, text, ids)])
            )
        return self._templates[index].render(delta.text, delta.token_ids)

    def usage_chunk(self, usage: Usage) -> bytes:
        message = self._message([])
        message.usage = usage
        return sse(message)

    def _next_choice(self, index: int, text: str, token_ids: tuple[int, ...]) -> CompletionChoice:
        delta = CompletionOutput(text, token_ids, (), None, None)
        return self._choice(Choice(index, (), delta, is_first=False))

    def _choice(self, choice: Choice) -> CompletionChoice:
        output, shows_ids = choice.output, self._metadata.return_token_ids
        return CompletionChoice(
            index=choice.index,
            text=output.text,
            logprobs=self._logprobs(choice) if self._shows_logprobs else None,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if shows_ids else UNSET,
            prompt_token_ids=choice.prompt if shows_ids and choice.is_first else UNSET,
        )

    def _message(self, choices: list[CompletionChoice]) -> Completion:
        metadata = self._metadata
        usage = None if metadata.include_usage else UNSET
        return Completion(metadata.id, metadata.created, metadata.model, choices, usage=usage)

    def _logprobs(self, choice: Choice) -> CompletionLogprobs:
        shape, self._offsets[choice.index] = completion_logprobs(
            self._tokenizer, choice.output.logprobs, self._offsets[choice.index]
        )
        return shape


def completion_routes(router: Router, keys: KeyRing) -> APIRouter:
    """Return the routes of text completions."""
    routes = APIRouter()

    @routes.post("/v1/completions", openapi_extra=openapi_body(CompletionBody))
    async def create_completion(http: HttpRequest) -> Response:
        principal = keys.authenticate(http)
        body = await read_body(http, CompletionBody, router.config.max_body_bytes)
        call = call_of(http, principal, body)
        prepared = await prepare_completion(router, call, body)
        model, requests = prepared.model, prepared.requests
        metadata, shows_logprobs = metadata_of(call, "cmpl"), prepared.shows_logprobs
        keep = keep_of(
            call, model, len(requests), "completions", metadata, router.config, shows_logprobs
        )
        generation = router.generate(model, requests, call.text_options, call.arrival, keep)
        builder = CompletionResponseBuilder(router.tokenizer, metadata, shows_logprobs)
        if body.stream:
            return await stream_response(http, generation, builder, metadata.include_usage)
        return await full_response(http, generation, prepared.limits.choices, builder)

    return routes
