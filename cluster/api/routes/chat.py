"""POST /v1/chat/completions: one conversation.

Owns what a conversation may hold, and the spelling of the messages of its response.
"""

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
    choices_of,
    resolve_model,
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
from cluster.api.schemas.requests import ChatBody, ConversationBody, Message
from cluster.api.schemas.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    DeltaMessage,
    Usage,
)
from cluster.errors import InvalidRequest
from cluster.router.output_processor import CompletionOutput
from cluster.router.router import Router
from cluster.router.tokenizer import Tokenizer


def conversation(messages: list[Message]) -> list[dict[str, Any]]:
    """Return the turns as a chat template takes them, their parts of text joined by newlines."""
    turns: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        param = f"messages.{number}"
        _refuse_extras(message.model_extra or {}, param)
        turn = {"role": message.role, "content": _content(message.content, f"{param}.content")}
        if message.name is not None:
            turn["name"] = message.name
        turns.append(turn)
    return turns


def _content(value: JsonValue, param: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{param}: must be a string or a list of text parts", param)
    texts = []
    for number, part in enumerate(value):
        if not (isinstance(part, dict) and part.get("type") == "text"):
            raise InvalidRequest(f"{param}: only parts of type text are supported", param)
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{param}: a part of type text has no text", param)
        extras = {name: value for name, value in part.items() if name not in ("type", "text")}
        _refuse_extras(extras, f"{param}.{number}")
        texts.append(text)
    return "\n".join(texts)


def _refuse_extras(extras: dict[str, JsonValue], where: str) -> None:
    """Raise InvalidRequest for the first of what is not known and says something."""
    for name, value in sorted(extras.items()):
        if value is not None and value != []:
            param = f"{where}.{name[:100]}"
            raise InvalidRequest(f"{param} is not supported", param, "unsupported_parameter")


async def conversation_tokens(
    router: Router, body: ConversationBody, add_special_tokens: bool
) -> tuple[int, ...]:
    """Return a conversation as tokens."""
    continues = bool(body.continue_final_message)
    opens = body.add_generation_prompt
    if continues and opens:
        raise InvalidRequest(
            "continue_final_message: cannot be together with add_generation_prompt",
            "continue_final_message",
        )
    text = await router.render(
        conversation(body.messages),
        add_generation_prompt=not continues and opens is not False,
        continue_final_message=continues,
        variables=body.chat_template_kwargs or {},
    )
    token_ids = await router.encode(text, add_special_tokens)
    if not token_ids:
        raise InvalidRequest("messages: they render to an empty prompt", "messages")
    return token_ids


def num_logprobs(body: ChatBody) -> int | None:
    """Return how many alternatives are wanted for each token; None for no log-probabilities."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs=true", "top_logprobs")
    return None


class ChatResponseBuilder:
    """Spells the messages of one call of /v1/chat/completions."""

    def __init__(
        self, tokenizer: Tokenizer, metadata: ResponseMetadata, shows_logprobs: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._metadata = metadata
        self._shows_logprobs = shows_logprobs
        self._templates: dict[int, ChunkTemplate] = {}  # of what a choice grows by, by its index

    def full_response(self, choices: Sequence[Choice], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            id=self._metadata.id,
            created=self._metadata.created,
            model=self._metadata.model,
            choices=[self._choice(choice) for choice in choices],
            usage=usage,
            prompt_token_ids=choices[0].prompt if self._metadata.return_token_ids else UNSET,
        )

    def chunk(self, choice: Choice) -> bytes:
        delta, index = choice.output, choice.index
        if choice.is_first or delta.finish_reason is not None or self._shows_logprobs:
            return sse(self._chunk_of(choice))
        if index not in self._templates:
            self._templates[index] = ChunkTemplate(
                lambda text, ids: self._next_chunk(index, text, ids)
            )
        return self._templates[index].render(delta.text, delta.token_ids)

    def _next_chunk(self, index: int, text: str, token_ids: tuple[int, ...]) -> ChatChunk:
        delta = CompletionOutput(text, token_ids, (), None, None)
        return self._chunk_of(Choice(index, (), delta, is_first=False))

    def _chunk_of(self, choice: Choice) -> ChatChunk:
        chunk = self._message([self._delta(choice)])
        if self._metadata.return_token_ids and choice.is_first and choice.index == 0:
            chunk.prompt_token_ids = choice.prompt
        return chunk

    def usage_chunk(self, usage: Usage) -> bytes:
        chunk = self._message([])
        chunk.usage = usage
        return sse(chunk)

    def _choice(self, choice: Choice) -> ChatChoice:
        output = choice.output
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(output.text),
            logprobs=self._logprobs(output),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._metadata.return_token_ids else UNSET,
        )

    def _delta(self, choice: Choice) -> ChatChunkChoice:
        delta, is_first = choice.output, choice.is_first
        return ChatChunkChoice(
            index=choice.index,
            delta=DeltaMessage(
                role="assistant" if is_first else UNSET,
                content=delta.text if delta.text or is_first else UNSET,
            ),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason if delta.finish_reason is not None else UNSET,
            token_ids=delta.token_ids if self._metadata.return_token_ids else UNSET,
        )

    def _message(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        metadata = self._metadata
        usage = None if metadata.include_usage else UNSET
        return ChatChunk(metadata.id, metadata.created, metadata.model, choices, usage=usage)

    def _logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        if not self._shows_logprobs:
            return None
        return chat_logprobs(self._tokenizer, output.logprobs)


def chat_routes(router: Router, keys: KeyRing) -> APIRouter:
    """Return the routes of chat completions."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=openapi_body(ChatBody))
    async def create_chat_completion(http: HttpRequest) -> Response:
        principal = keys.authenticate(http)
        body = await read_body(http, ChatBody, router.config.max_body_bytes)
        call = call_of(http, principal, body)
        limits = GenerationLimits(
            max_tokens=body.max_completion_tokens or body.max_tokens,
            default_max_tokens=None,
            num_logprobs=num_logprobs(body),
            choices=choices_of(body, 1, router.config),
        )
        await check_grammar(router, call)
        model = await resolve_model(router, call)
        prompt = await conversation_tokens(router, body, bool(body.add_special_tokens))
        requests = build_requests(router, call, model, [prompt], limits)
        metadata, shows_logprobs = metadata_of(call, "chatcmpl"), limits.num_logprobs is not None
        keep = keep_of(call, model, 1, "chat", metadata, router.config, shows_logprobs)
        generation = router.generate(model, requests, call.text_options, call.arrival, keep)
        builder = ChatResponseBuilder(router.tokenizer, metadata, shows_logprobs)
        if body.stream:
            return await stream_response(http, generation, builder, metadata.include_usage)
        return await full_response(http, generation, limits.choices, builder)

    return routes
