"""POST /v1/chat/completions: one conversation, and the spelling of its response."""

from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.api.auth import Authenticator
from cluster.api.error_handlers import ErrorReply
from cluster.api.http import read_body, sse
from cluster.api.middleware.rate_limits import admission_of, let_in, reserve
from cluster.api.openapi.operation import GENERATION, OF_STREAMS, Operation, declared
from cluster.api.prepare import prepare_chat
from cluster.api.prompt_logprobs import spelled
from cluster.api.request_builder import (
    call_of,
)
from cluster.api.response_builder import (
    Choice,
    ChunkTemplate,
    ResponseMetadata,
    chat_logprobs,
    full_response,
    metadata_of,
    stream_response,
)
from cluster.api.resumable import keep_of
from cluster.api.schemas.requests import ChatBody
from cluster.api.schemas.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    DeltaMessage,
    PromptLogprobsList,
    Usage,
)
from cluster.api.tools.chat_messages import ParsedMessages
from cluster.router.output_processor import CompletionOutput
from cluster.router.parser.families import MessageFormat
from cluster.router.router import Router
from cluster.router.tokenizer import Tokenizer


class ChatResponseBuilder:
    """Spells the messages of one call of /v1/chat/completions."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        metadata: ResponseMetadata,
        shows_logprobs: bool,
        message_format: MessageFormat | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._metadata = metadata
        self._shows_logprobs = shows_logprobs
        self._is_uneven = shows_logprobs or metadata.continuous_usage  # more than texts differ
        self._messages = (
            None if message_format is None else ParsedMessages(message_format, metadata.id)
        )
        self._templates: dict[int, ChunkTemplate] = {}  # of what a choice grows by, by its index

    def full_response(self, choices: Sequence[Choice], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            id=self._metadata.id,
            created=self._metadata.created,
            model=self._metadata.model,
            choices=[self._choice(choice) for choice in choices],
            usage=self._metadata.shown(usage),
            prompt_token_ids=choices[0].prompt if self._metadata.return_token_ids else None,
            prompt_logprobs=self._prompt_logprobs(choices[0]),
        )

    def _prompt_logprobs(self, choice: Choice) -> PromptLogprobsList | None:
        num_best = self._metadata.num_prompt_logprobs
        if num_best is None:
            return None
        return spelled(self._tokenizer, choice.prompt, choice.prompt_logprobs, num_best)

    def chunk(self, choice: Choice) -> bytes:
        if self._messages is not None:
            return self._parsed_chunk(self._messages, choice)
        delta, index = choice.output, choice.index
        if choice.is_first or delta.finish_reason is not None or self._is_uneven:
            return sse(self._chunk_of(choice))
        if index not in self._templates:
            self._templates[index] = ChunkTemplate(
                lambda text, ids: self._next_chunk(index, text, ids)
            )
        return self._templates[index].render(delta.text, delta.token_ids)

    def _parsed_chunk(self, messages: ParsedMessages, choice: Choice) -> bytes:
        """Return the event of what is certain now, nothing if nothing is."""
        finish_reason = choice.output.finish_reason
        message = messages.grow(choice.index, choice.output.text, finish_reason is not None)
        is_silent = not (message or choice.is_first or finish_reason)
        if is_silent and not (self._shows_logprobs or self._metadata.return_token_ids):
            return b""
        chunk = self._chunk_of(choice)
        chunk.choices[0].delta = self._echoing(
            choice, messages.delta(choice.index, message, choice.is_first)
        )
        chunk.choices[0].finish_reason = messages.finish_reason(choice.index, finish_reason)
        return sse(chunk)

    def _next_chunk(self, index: int, text: str, token_ids: tuple[int, ...]) -> ChatChunk:
        delta = CompletionOutput(text, token_ids, (), None, None)
        return self._chunk_of(Choice(index, (), delta, is_first=False))

    def _chunk_of(self, choice: Choice) -> ChatChunk:
        chunk = self._message([self._delta(choice)])
        if self._metadata.continuous_usage:
            chunk.usage = self._metadata.shown(choice.usage)
        if self._metadata.return_token_ids and choice.is_first and choice.index == 0:
            chunk.prompt_token_ids = choice.prompt
        return chunk

    def usage_chunk(self, usage: Usage) -> bytes:
        chunk = self._message([])
        chunk.usage = self._metadata.shown(usage)
        return sse(chunk)

    def _choice(self, choice: Choice) -> ChatChoice:
        output = choice.output
        message = ChatMessage(output.text)
        finish_reason: str | None = output.finish_reason
        if self._messages is not None:
            message = self._messages.whole(choice.index, output.text)
            finish_reason = self._messages.finish_reason(choice.index, output.finish_reason)
        echo = self._metadata.echo(choice.index)
        if echo:
            message.content = echo + (message.content or "")
        return ChatChoice(
            index=choice.index,
            message=message,
            logprobs=self._logprobs(output),
            finish_reason=finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._metadata.return_token_ids else None,
        )

    def _delta(self, choice: Choice) -> ChatChunkChoice:
        delta, is_first = choice.output, choice.is_first
        return ChatChunkChoice(
            index=choice.index,
            delta=self._echoing(
                choice,
                DeltaMessage(
                    role="assistant" if is_first else UNSET,
                    content=delta.text if delta.text or is_first else UNSET,
                ),
            ),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason if delta.finish_reason is not None else UNSET,
            token_ids=delta.token_ids if self._metadata.return_token_ids else UNSET,
        )

    def _echoing(self, choice: Choice, delta: DeltaMessage) -> DeltaMessage:
        """Put what a choice begins with, if anything, before the first that is said of it."""
        if choice.is_first and delta.content is not UNSET:
            delta.content = self._metadata.echo(choice.index) + delta.content
        return delta

    def _message(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        metadata = self._metadata
        usage = None if metadata.include_usage else UNSET
        return ChatChunk(metadata.id, metadata.created, metadata.model, choices, usage=usage)

    def _logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        if not self._shows_logprobs:
            return None
        as_ids = self._metadata.return_tokens_as_token_ids
        return chat_logprobs(self._tokenizer, output.logprobs, as_ids)


CHAT = Operation(
    tag="inference",
    summary="Goes on with a conversation.",
    right="model",
    body=ChatBody,
    answer=ChatCompletion,
    events=(ChatChunk, ErrorReply),
    errors=GENERATION,
    headers=OF_STREAMS,
    example={
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Where is Riga?"}],
        "max_tokens": 64,
    },
)


def chat_routes(router: Router, keys: Authenticator) -> APIRouter:
    """Return the routes of chat completions."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=declared(CHAT))
    async def create_chat_completion(http: HttpRequest) -> Response:
        principal = keys.authenticate(http)
        await let_in(http, router, principal)
        body = await read_body(http, ChatBody, router.config.max_body_bytes)
        call = call_of(http, principal, body)
        prepared = await prepare_chat(router, call, body)
        model, requests = prepared.model, prepared.requests
        call, message_format = prepared.call, prepared.message_format
        metadata, shows_logprobs = (
            metadata_of(call, "chatcmpl", router.config),
            prepared.shows_logprobs,
        )
        if prepared.echoes:
            metadata = replace(
                metadata, echoes=prepared.echoes, num_choices=prepared.limits.choices.n
            )
        if body.prompt_logprobs is not None:
            metadata = replace(metadata, num_prompt_logprobs=body.prompt_logprobs)
        keep = keep_of(
            call, model, 1, "chat", metadata, router.config, shows_logprobs, message_format
        )
        is_bounded = prepared.limits.max_tokens is not None
        admission = await reserve(admission_of(http), requests, is_bounded=is_bounded)
        generation = router.generate(
            model, requests, call.text_options, call.arrival, keep, admission=admission
        )
        builder = ChatResponseBuilder(router.tokenizer, metadata, shows_logprobs, message_format)
        if body.stream:
            return await stream_response(http, generation, builder, metadata.include_usage)
        return await full_response(http, generation, prepared.limits.choices, builder)

    return routes
