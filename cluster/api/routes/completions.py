"""POST /v1/completions: one prompt or several, as text or as token ids.

Owns what a prompt may be, and the spelling of the messages of its response.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from msgspec import UNSET
from pydantic import JsonValue
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.api.auth import KeyRing
from cluster.api.http import openapi_body, read_body, sse
from cluster.api.request_builder import (
    GenerationLimits,
    build_requests,
    call_of,
    check_grammar,
    check_token_ids,
    choices_of,
    resolve_model,
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
from cluster.errors import InvalidRequest
from cluster.router.config import RouterConfig
from cluster.router.output_processor import CompletionOutput, TokenLogprob
from cluster.router.router import Router
from cluster.router.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's for this call; a chat may fill the context


def prompts(value: JsonValue, config: RouterConfig) -> list[str | list[int]]:
    """Return the prompts of a body of /v1/completions: texts or lists of token ids.

    Raises:
        InvalidRequest: unless it is a string, a list of token ids, or a list of such.
    """
    wrong = InvalidRequest(
        "prompt: must be a string, a list of strings, a list of token ids or a list of such lists",
        "prompt",
    )
    items: Any = [value] if isinstance(value, str) or _are_tokens(value) else value
    if not isinstance(items, list):
        raise wrong
    if not 1 <= len(items) <= config.max_prompts:
        raise InvalidRequest(
            f"prompt: 1 to {config.max_prompts} prompts in one call, not {len(items)}", "prompt"
        )
    for item in items:
        if not (isinstance(item, str) or _are_tokens(item)):
            raise wrong
        if not item:
            raise InvalidRequest("prompt: must not be empty", "prompt")
        if isinstance(item, list):
            check_token_ids(item, config, "prompt")
    return items


def _are_tokens(value: JsonValue) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


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
        given = prompts(body.prompt, router.config)
        limits = GenerationLimits(
            max_tokens=body.max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            num_logprobs=body.logprobs,
            choices=choices_of(body, len(given), router.config),
        )
        await check_grammar(router, call)
        model = await resolve_model(router, call)
        tokenized = await _tokens(router, given, body.add_special_tokens is not False)
        requests = build_requests(router, call, model, tokenized, limits)
        metadata, shows_logprobs = metadata_of(call, "cmpl"), body.logprobs is not None
        keep = keep_of(
            call, model, len(given), "completions", metadata, router.config, shows_logprobs
        )
        generation = router.generate(model, requests, call.text_options, call.arrival, keep)
        builder = CompletionResponseBuilder(router.tokenizer, metadata, shows_logprobs)
        if body.stream:
            return await stream_response(http, generation, builder, metadata.include_usage)
        return await full_response(http, generation, limits.choices, builder)

    return routes
