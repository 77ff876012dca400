"""Completions that begin with their prompt: `echo`, and with `max_tokens` 0 nothing but it."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from starlette.responses import Response

from cluster.api.http import SSE_DONE, event_stream
from cluster.api.response_builder import (
    INLINE_TOKENS,
    Choice,
    ResponseBuilder,
    ResponseMetadata,
    spelled_response,
)
from cluster.api.schemas.requests import CompletionBody
from cluster.api.schemas.responses import PromptTokensDetails, Usage
from cluster.errors import InvalidRequest
from cluster.request import Request
from cluster.router.generation import Generation
from cluster.router.output_processor import CompletionOutput
from cluster.router.router import Router
from worker.protocol import TokenLogprobs

_NOTHING = CompletionOutput("", (), (), "length", None)


def check_echo(body: CompletionBody) -> None:
    """Raise InvalidRequest for what an echo cannot have, and an empty answer without one."""
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens: 0 is only allowed with echo=true", "max_tokens")


async def echoed_texts(
    router: Router,
    given: Sequence[str | list[int]],
    tokenized: Sequence[tuple[int, ...]],
    kept: Sequence[tuple[int, ...]],
) -> tuple[str, ...]:
    """Return the text of each prompt: as it was given, or of the tokens that there are of it."""
    return tuple(
        [
            prompt
            if isinstance(prompt, str) and whole is left
            else await asyncio.to_thread(router.tokenizer.decode, left, False)
            for prompt, whole, left in zip(given, tokenized, kept, strict=True)
        ]
    )


async def echo_response(
    prompts: Sequence[Sequence[Request]],
    builder: ResponseBuilder,
    metadata: ResponseMetadata,
    is_stream: bool,
    scores: Sequence[tuple[TokenLogprobs, ...]] = (),
) -> Response:
    """Answer with the prompts alone, and with the log-probabilities of each if they are given."""
    num_tokens = sum(len(choices[0].token_ids) for choices in prompts)
    usage = Usage(num_tokens, 0, num_tokens, PromptTokensDetails(0))
    shown: list[Choice] = []
    for number, requests in enumerate(prompts):
        of_prompt = scores[number] if scores else ()
        for request in requests[: metadata.num_choices]:
            prompt = request.token_ids
            shown.append(
                Choice(len(shown), prompt, _NOTHING, is_first=True, prompt_logprobs=of_prompt)
            )
    if not is_stream:
        return await spelled_response(builder, shown, usage)

    async def events() -> AsyncGenerator[bytes]:
        for choice in shown:
            if len(choice.prompt_logprobs) > INLINE_TOKENS:
                yield await asyncio.to_thread(builder.chunk, choice)
            else:
                yield builder.chunk(choice)
        if metadata.include_usage:
            yield builder.usage_chunk(usage)
        yield SSE_DONE

    return await event_stream(events())


async def scored_echo_response(
    generation: Generation,
    prompts: Sequence[Sequence[Request]],
    builder: ResponseBuilder,
    metadata: ResponseMetadata,
    is_stream: bool,
) -> Response:
    """Answer with the prompts and their log-probabilities; the token behind each is not shown."""
    with generation:
        while generation.is_running:
            await generation.receive()
    scores = [choices[0].prompt_logprobs for choices in generation.prompts]
    return await echo_response(prompts, builder, metadata, is_stream, scores)
