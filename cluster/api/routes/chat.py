"""POST /v1/chat/completions: one conversation.

Owns the spelling of its messages. Knows nothing of schedulers.
"""

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
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Delta,
    Mould,
    Usage,
    sse,
)
from cluster.errors import InvalidRequest
from cluster.router.output_processor import OutputDelta
from cluster.router.router import Router
from cluster.router.schemas import ChatBody, ConversationBody
from cluster.router.tokenizer import Tokenizer
from cluster.router.validation import chat_logprobs, conversation


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


class _ChatForm:
    """Spells the messages of one call of /v1/chat/completions."""

    def __init__(self, tokenizer: Tokenizer, call: Call, shows_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._call = call
        self._shows_logprobs = shows_logprobs
        self._moulds: dict[int, Mould] = {}  # of what a choice grows by, by its index

    def whole(self, choices: Sequence[Choice], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            id=self._call.id,
            created=self._call.created,
            model=self._call.model,
            choices=[self._choice(choice) for choice in choices],
            usage=usage,
            prompt_token_ids=choices[0].prompt if self._call.return_token_ids else UNSET,
        )

    def event(self, choice: Choice) -> bytes:
        piece, index = choice.piece, choice.index
        if choice.is_first or piece.finish_reason is not None or self._shows_logprobs:
            return sse(self._event(choice))
        if index not in self._moulds:
            self._moulds[index] = Mould(lambda text, ids: self._more(index, text, ids))
        return self._moulds[index].cast(piece.text, piece.token_ids)

    def _more(self, index: int, text: str, token_ids: tuple[int, ...]) -> ChatChunk:
        piece = OutputDelta(text, token_ids, (), None, None)
        return self._event(Choice(index, (), piece, is_first=False))

    def _event(self, choice: Choice) -> ChatChunk:
        chunk = self._chunk([self._growth(choice)])
        if self._call.return_token_ids and choice.is_first and choice.index == 0:
            chunk.prompt_token_ids = choice.prompt
        return chunk

    def usage_event(self, usage: Usage) -> bytes:
        chunk = self._chunk([])
        chunk.usage = usage
        return sse(chunk)

    def _choice(self, choice: Choice) -> ChatChoice:
        piece = choice.piece
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(piece.text),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if self._call.return_token_ids else UNSET,
        )

    def _growth(self, choice: Choice) -> ChatChunkChoice:
        piece, is_first = choice.piece, choice.is_first
        return ChatChunkChoice(
            index=choice.index,
            delta=Delta(
                role="assistant" if is_first else UNSET,
                content=piece.text if piece.text or is_first else UNSET,
            ),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason if piece.finish_reason is not None else UNSET,
            token_ids=piece.token_ids if self._call.return_token_ids else UNSET,
        )

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        call = self._call
        usage = None if call.include_usage else UNSET
        return ChatChunk(call.id, call.created, call.model, choices, usage=usage)

    def _logprobs(self, piece: OutputDelta) -> ChatLogprobs | None:
        if not self._shows_logprobs:
            return None
        return logprobs.chat_logprobs(self._tokenizer, piece.logprobs)


def chat_routes(router: Router) -> APIRouter:
    """Return the routes of chat completions."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=body_of(ChatBody))
    async def create_chat_completion(http: HttpRequest) -> Response:
        caller = Caller(router.authenticate(http), request_id_of(http))
        body = await read_body(http, ChatBody, router.config.max_body_bytes)
        options = check_body(body)
        wanted = Wanted(
            max_tokens=body.max_completion_tokens or body.max_tokens,
            default_max_tokens=None,
            num_logprobs=chat_logprobs(body),
            choices=choices_of(body, 1, router.config),
        )
        model = await chosen_model(router, caller, body)
        prompt = await conversation_tokens(router, body, bool(body.add_special_tokens))
        requests = make_requests(router, caller, body, model, [prompt], wanted)
        generation = router.generate(model, requests, options)
        call = call_of("chatcmpl", http, body)
        form = _ChatForm(router.tokenizer, call, wanted.num_logprobs is not None)
        if body.stream:
            return await stream_response(http, generation, form, call.include_usage)
        return await whole_response(http, generation, wanted.choices, form)

    return routes
