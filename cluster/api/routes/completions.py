"""POST /v1/completions: prompts as text or as token ids, and the spelling of their response."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.api.auth import Authenticator
from cluster.api.echo import echo_response, scored_echo_response
from cluster.api.error_handlers import ErrorReply
from cluster.api.http import read_body, sse, unless_disconnected
from cluster.api.middleware.rate_limits import admission_of, let_in, reserve
from cluster.api.openapi.operation import GENERATION, OF_STREAMS, Operation, declared
from cluster.api.prepare import prepare_completion
from cluster.api.prompt_logprobs import entries_of, spelled
from cluster.api.request_builder import call_of
from cluster.api.response_builder import (
    Choice,
    ChunkTemplate,
    ResponseMetadata,
    full_response,
    metadata_of,
    shown_token,
    stream_response,
)
from cluster.api.resumable import keep_of
from cluster.api.schemas.requests import CompletionBody
from cluster.api.schemas.responses import (
    LOGPROB_FLOOR,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobsList,
    Usage,
)
from cluster.router.bodies.validation import MAX_VALUES_OF_TOKENS
from cluster.router.output_processor import CompletionOutput, TokenLogprob
from cluster.router.router import Router
from cluster.router.tokenizer import Tokenizer


def add_logprobs(
    shape: CompletionLogprobs,
    tokenizer: Tokenizer,
    entries: Sequence[TokenLogprob],
    offset: int,
    as_ids: bool = False,
) -> int:
    """Add tokens to the shape of /v1/completions; return the offset behind them.

    Offsets count the tokens' own texts, so that they stay in step with `tokens`.
    """
    for entry in entries:
        text = tokenizer.token_text(entry.token_id)
        shape.text_offset.append(offset)
        shape.token_logprobs.append(max(entry.logprob, LOGPROB_FLOOR))
        shape.tokens.append(shown_token(tokenizer, entry.token_id, as_ids))
        best = ((entry.token_id, entry.logprob), *entry.top)
        shape.top_logprobs.append(
            {
                shown_token(tokenizer, token_id, as_ids): max(logprob, LOGPROB_FLOOR)
                for token_id, logprob in best
            }
        )
        offset += len(text)
    return offset


class CompletionResponseBuilder:
    """Spells the messages of one call of /v1/completions."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        metadata: ResponseMetadata,
        shows_logprobs: bool,
        num_logprobs: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._metadata = metadata
        self._shows_logprobs = shows_logprobs
        self._num_logprobs = num_logprobs  # alternatives of a prompt's tokens that are shown
        self._is_uneven = shows_logprobs or metadata.continuous_usage  # more than texts differ
        self._templates: dict[int, ChunkTemplate] = {}  # of what a choice grows by, by its index
        self._offsets: defaultdict[int, int] = defaultdict(int)  # characters, by choice

    def full_response(self, choices: Sequence[Choice], usage: Usage) -> Completion:
        message = self._message([self._choice(choice, absent=None) for choice in choices])
        message.usage = self._metadata.shown(usage)
        return message

    def chunk(self, choice: Choice) -> bytes:
        delta, index = choice.output, choice.index
        if choice.is_first or delta.finish_reason is not None or self._is_uneven:
            message = self._message([self._choice(choice)])
            if self._metadata.continuous_usage:
                message.usage = self._metadata.shown(choice.usage)
            return sse(message)
        if index not in self._templates:
            self._templates[index] = ChunkTemplate(
                lambda text, ids: self._message([self._next_choice(index, text, ids)])
            )
        return self._templates[index].render(delta.text, delta.token_ids)

    def usage_chunk(self, usage: Usage) -> bytes:
        message = self._message([])
        message.usage = self._metadata.shown(usage)
        return sse(message)

    def _next_choice(self, index: int, text: str, token_ids: tuple[int, ...]) -> CompletionChoice:
        delta = CompletionOutput(text, token_ids, (), None, None)
        return self._choice(Choice(index, (), delta, is_first=False))

    def _choice(self, choice: Choice, absent: None | UnsetType = UNSET) -> CompletionChoice:
        output, shows_ids = choice.output, self._metadata.return_token_ids
        return CompletionChoice(
            index=choice.index,
            text=self._metadata.echo(choice.index) + output.text
            if choice.is_first
            else output.text,
            logprobs=self._logprobs(choice) if self._shows_logprobs else None,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if shows_ids else absent,
            prompt_token_ids=choice.prompt if shows_ids and choice.is_first else absent,
            prompt_logprobs=self._prompt_logprobs(choice, absent),
        )

    def _message(self, choices: list[CompletionChoice]) -> Completion:
        metadata = self._metadata
        usage = None if metadata.include_usage else UNSET
        return Completion(metadata.id, metadata.created, metadata.model, choices, usage=usage)

    def _prompt_logprobs(
        self, choice: Choice, absent: None | UnsetType
    ) -> PromptLogprobsList | None | UnsetType:
        num_best = self._metadata.num_prompt_logprobs
        if num_best is None or not choice.is_first:
            return absent
        return spelled(self._tokenizer, choice.prompt, choice.prompt_logprobs, num_best)

    def _logprobs(self, choice: Choice) -> CompletionLogprobs:
        as_ids, offset = self._metadata.return_tokens_as_token_ids, self._offsets[choice.index]
        shape = CompletionLogprobs([], [], [], [])
        if choice.is_first and self._metadata.echoes:
            first = choice.prompt[0]
            shape.text_offset.append(offset)
            shape.token_logprobs.append(None)
            shape.tokens.append(shown_token(self._tokenizer, first, as_ids))
            shape.top_logprobs.append(None)
            offset += len(self._tokenizer.token_text(first))
            scores = entries_of(choice.prompt, choice.prompt_logprobs, self._num_logprobs)
            offset = add_logprobs(shape, self._tokenizer, scores, offset, as_ids)
        entries = choice.output.logprobs
        self._offsets[choice.index] = add_logprobs(shape, self._tokenizer, entries, offset, as_ids)
        return shape


COMPLETIONS = Operation(
    tag="inference",
    summary="Goes on with prompts.",
    right="model",
    body=CompletionBody,
    answer=Completion,
    events=(Completion, ErrorReply),
    errors=GENERATION,
    headers=OF_STREAMS,
    example={"model": "smollm2", "prompt": "Riga is", "max_tokens": 16},
)


def completion_routes(router: Router, keys: Authenticator) -> APIRouter:
    """Return the routes of text completions."""
    routes = APIRouter()

    @routes.post("/v1/completions", openapi_extra=declared(COMPLETIONS))
    async def create_completion(http: HttpRequest) -> Response:
        principal = keys.authenticate(http)
        await let_in(http, router, principal)
        body = await read_body(
            http, CompletionBody, router.config.max_body_bytes, MAX_VALUES_OF_TOKENS
        )
        call = call_of(http, principal, body)
        prepared = await prepare_completion(router, call, body)
        model, requests = prepared.model, prepared.requests
        metadata, shows_logprobs = metadata_of(call, "cmpl", router.config), prepared.shows_logprobs
        choices = prepared.limits.choices
        if prepared.echoes:
            metadata = replace(metadata, echoes=prepared.echoes, num_choices=choices.n)
        if body.prompt_logprobs is not None:
            metadata = replace(metadata, num_prompt_logprobs=body.prompt_logprobs)
        keep = keep_of(
            call, model, len(requests), "completions", metadata, router.config, shows_logprobs
        )
        builder = CompletionResponseBuilder(
            router.tokenizer, metadata, shows_logprobs, body.logprobs or 0
        )
        is_stream = bool(body.stream)
        if body.max_tokens == 0 and prepared.limits.num_prompt_logprobs is None:
            return await echo_response(requests, builder, metadata, is_stream)
        is_bounded = prepared.limits.max_tokens is not None
        admission = await reserve(admission_of(http), requests, is_bounded=is_bounded)
        generation = router.generate(
            model, requests, call.text_options, call.arrival, keep, admission=admission
        )
        if body.max_tokens == 0:
            work = scored_echo_response(generation, requests, builder, metadata, is_stream)
            return await unless_disconnected(http, work)
        if body.stream:
            return await stream_response(http, generation, builder, metadata.include_usage)
        return await full_response(http, generation, choices, builder)

    return routes
