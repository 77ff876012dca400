"""POST /v1/chat/completions.

Owns the responses' assembly. Knows nothing of schedulers.
"""

from collections.abc import AsyncGenerator

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
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatMessage,
    Delta,
    sse,
    usage_of,
)
from cluster.router.router import Router
from cluster.router.schemas import ChatBody, ConversationBody
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


async def _whole(
    router: Router, generation: Generation, call: Call, wants_logprobs: bool
) -> Response:
    texts: list[str] = []
    entries: list[TokenLogprob] = []
    token_ids: list[int] = []
    finish: Piece | None = None
    with generation:
        while generation.is_running:
            for _, piece in await generation.receive():
                texts.append(piece.text)
                entries += piece.logprobs
                token_ids += piece.token_ids
                finish = piece
    assert finish is not None, "an answer without an end"
    prompt = generation.answers[0].request.token_ids
    choice = ChatChoice(
        index=0,
        message=ChatMessage("".join(texts)),
        logprobs=logprobs.chat_logprobs(router.tokenizer, entries) if wants_logprobs else None,
        finish_reason=finish.finish_reason,
        stop_reason=finish.stop_reason,
        token_ids=tuple(token_ids) if call.return_token_ids else UNSET,
    )
    completion = ChatCompletion(
        id=call.id,
        created=call.created,
        model=call.model,
        choices=[choice],
        usage=usage_of(generation.answers),
        prompt_token_ids=prompt if call.return_token_ids else UNSET,
    )
    return Response(msgspec.json.encode(completion), media_type="application/json")


async def _stream(
    router: Router, generation: Generation, call: Call, wants_logprobs: bool
) -> AsyncGenerator[bytes]:
    def chunk(choices: list[ChatChunkChoice]) -> ChatChunk:
        usage = None if call.include_usage else UNSET
        return ChatChunk(call.id, call.created, call.model, choices, usage=usage)

    is_first = True
    with generation:
        while generation.is_running:
            for _, piece in await generation.receive():
                message = chunk([_delta(router, piece, call, wants_logprobs, is_first)])
                if is_first and call.return_token_ids:
                    message.prompt_token_ids = generation.answers[0].request.token_ids
                is_first = False
                yield sse(message)
        if call.include_usage:
            message = chunk([])
            message.usage = usage_of(generation.answers)
            yield sse(message)


def _delta(
    router: Router, piece: Piece, call: Call, wants_logprobs: bool, is_first: bool
) -> ChatChunkChoice:
    is_last = piece.finish_reason is not None
    return ChatChunkChoice(
        index=0,
        delta=Delta(
            role="assistant" if is_first else UNSET,
            content=piece.text if piece.text or is_first else UNSET,
        ),
        logprobs=logprobs.chat_logprobs(router.tokenizer, piece.logprobs)
        if wants_logprobs
        else None,
        finish_reason=piece.finish_reason,
        stop_reason=piece.stop_reason if is_last else UNSET,
        token_ids=piece.token_ids if call.return_token_ids else UNSET,
    )


def chat_routes(router: Router) -> APIRouter:
    """Return the routes of chat completions."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=body_of(ChatBody))
    async def create_chat_completion(http: HttpRequest) -> Response:
        principal = router.authenticate(http)
        body = await read_body(http, ChatBody, router.config.max_body_bytes)
        options = check_body(body)
        wanted = Wanted(body.max_completion_tokens or body.max_tokens, None, chat_logprobs(body))
        model = await router.model(body.model, principal)
        prompt = await conversation_tokens(router, body, bool(body.add_special_tokens))
        requests = make_requests(router, http, body, model, [prompt], wanted)
        generation = router.generate(model, requests, options)
        call = call_of("chatcmpl", http, body)
        wants_logprobs = wanted.num_logprobs is not None
        if body.stream:
            events = with_end(_stream(router, generation, call, wants_logprobs))
            return await unless_disconnected(http, event_stream(events))
        return await unless_disconnected(http, _whole(router, generation, call, wants_logprobs))

    return routes
