"""From the deltas of a call's outputs to its response, whole or streamed.

Owns which delta belongs to which choice, and their order. How a message is spelled is a
ResponseBuilder's.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.api.error_handlers import error_body
from cluster.api.http import JSON, SSE_DONE, event_stream, json_response, sse, unless_disconnected
from cluster.api.long_responses import encoded
from cluster.api.request_builder import Call, Choices
from cluster.api.schemas.requests import TextBody
from cluster.api.schemas.responses import (
    LOGPROB_FLOOR,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    Completion,
    CompletionTokensDetails,
    PromptTokensDetails,
    TopLogprob,
    Usage,
)
from cluster.errors import TopworkError
from cluster.router.config import RouterConfig
from cluster.router.generation import Generation
from cluster.router.output_processor import CompletionOutput, OutputProcessor, TokenLogprob
from cluster.router.tokenizer import Tokenizer
from cluster.router.tracing.call_trace import note_response_id
from worker.protocol import TokenLogprobs

_encode = msgspec.json.Encoder().encode
INLINE_TOKENS = 256  # with log-probabilities, likewise
INLINE_CHARACTERS = 65536  # longer answers are spelled in a thread, away from the streams
_SOME_TEXT = "\0text\0"
_SOME_TOKENS = (-(2**62), 2**62)


@dataclass(frozen=True, slots=True)
class ResponseMetadata:
    """What every message of a response repeats."""

    id: str
    created: int  # seconds since 1970
    model: str
    include_usage: bool
    return_token_ids: bool
    return_tokens_as_token_ids: bool = False
    continuous_usage: bool = False  # with each event of a stream
    echoes: tuple[str, ...] = ()  # the text of each prompt, that its answers begin with
    num_choices: int = 1  # of each prompt
    num_prompt_logprobs: int | None = None  # alternatives of each token of a prompt, if asked for
    shows_cached_tokens: bool = True  # in its usage

    def echo(self, index: int) -> str:
        """Return what a choice begins with before its answer."""
        return self.echoes[index // self.num_choices] if self.echoes else ""

    def shown(self, usage: Usage) -> Usage:
        """Return what the caller is told of counts."""
        if self.shows_cached_tokens:
            return usage
        return msgspec.structs.replace(usage, prompt_tokens_details=UNSET)


def metadata_of(call: Call, prefix: str, config: RouterConfig) -> ResponseMetadata:
    """Return what the responses to a call repeat; its id begins with `prefix`."""
    body = call.body
    options = body.stream_options
    include_usage = bool(options and options.include_usage)
    response_id = f"{prefix}-{call.request_id}"
    note_response_id(response_id)
    return ResponseMetadata(
        id=response_id,
        created=int(time.time()),
        model=body.model,
        include_usage=include_usage,
        return_token_ids=bool(body.return_token_ids),
        return_tokens_as_token_ids=isinstance(body, TextBody)
        and bool(body.return_tokens_as_token_ids),
        continuous_usage=bool(include_usage and options and options.continuous_usage_stats),
        shows_cached_tokens=config.enable_prompt_tokens_details,
    )


class Choice(msgspec.Struct, frozen=True, gc=False):
    """What one choice of a response says, or what it grows by."""

    index: int
    prompt: tuple[int, ...]  # token ids
    output: CompletionOutput
    is_first: bool  # nothing of this choice has been sent before
    num_tokens: int = 0  # of the answer, that have been sent with this
    num_cached_tokens: int = 0  # of the prompt
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # if asked for, from the second token on

    @property
    def usage(self) -> Usage:
        """The counts of this choice so far."""
        return Usage(
            len(self.prompt),
            self.num_tokens,
            len(self.prompt) + self.num_tokens,
            PromptTokensDetails(self.num_cached_tokens),
            _details(self.output.num_reasoning_tokens),
        )


class ResponseBuilder(Protocol):
    """How one of the two ways to ask for text spells its messages; serves one call."""

    def full_response(self, choices: Sequence[Choice], usage: Usage) -> ChatCompletion | Completion:
        """Return the response that holds everything at once."""
        ...

    def chunk(self, choice: Choice) -> bytes:
        """Return the event of a stream that says what a choice grew by, nothing for nothing yet."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the event of a stream that gives the usage, after all choices have ended."""
        ...


@dataclass(frozen=True, slots=True)
class Begun:
    """What there is of a stream when it is opened."""

    counts: list[int]  # tokens of each choice that the reader has
    missed: Sequence[tuple[int, CompletionOutput]]  # what came since, by choice


async def full_response(
    http: HttpRequest, generation: Generation, choices: Choices, builder: ResponseBuilder
) -> Response:
    """Answer the call at once, when all its choices have ended."""
    return await unless_disconnected(http, _full(generation, choices, builder))


async def stream_response(
    http: HttpRequest,
    generation: Generation,
    builder: ResponseBuilder,
    include_usage: bool,
    begun: Begun | None = None,
) -> Response:
    """Answer the call with a stream of events, one for each delta.

    `begun` is of a stream that is read on.
    """
    if begun is None:
        begun = Begun([0] * len(generation.processors), ())
    events = _events(generation, builder, include_usage, begun)
    return await unless_disconnected(http, event_stream(events, generation.stream_id))


async def _full(generation: Generation, choices: Choices, builder: ResponseBuilder) -> Response:
    deltas: list[list[CompletionOutput]] = [[] for _ in generation.processors]
    with generation:
        while generation.is_running:
            for index, delta in await generation.receive():
                deltas[index].append(delta)
    outputs = [_joined(of_one) for of_one in deltas]
    shown: list[Choice] = []
    for start in range(0, len(outputs), choices.best_of):
        first = generation.processors[start]
        prompt, scores = first.request.token_ids, first.prompt_logprobs
        of_prompt = outputs[start : start + choices.best_of]
        for output in best(of_prompt, choices.n) if choices.are_ranked else of_prompt:
            choice = Choice(len(shown), prompt, output, is_first=True, prompt_logprobs=scores)
            shown.append(choice)
    return await spelled_response(builder, shown, usage_of(generation.prompts))


async def spelled_response(
    builder: ResponseBuilder, choices: Sequence[Choice], usage: Usage
) -> Response:
    """Return a whole response; one that takes long to spell is spelled away from the streams."""
    # A text may be taken apart; each token of a prompt has its own text and alternatives.
    is_long = (
        sum(len(choice.output.text) for choice in choices) > INLINE_CHARACTERS
        or sum(len(choice.prompt_logprobs) for choice in choices) > INLINE_TOKENS
        or sum(len(choice.output.logprobs) for choice in choices) > INLINE_TOKENS
    )
    if is_long:
        content = await asyncio.to_thread(lambda: encoded(builder.full_response(choices, usage)))
        return Response(content, media_type=JSON)
    return json_response(builder.full_response(choices, usage))


def _joined(deltas: list[CompletionOutput]) -> CompletionOutput:
    return CompletionOutput(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
        num_reasoning_tokens=deltas[-1].num_reasoning_tokens,
    )


async def _events(
    generation: Generation, builder: ResponseBuilder, include_usage: bool, start: Begun
) -> AsyncGenerator[bytes]:
    """Yield a stream's events, those that are here together as one, and its end.

    An error after the first event becomes one. An error before the first event is raised: the HTTP
    status can still carry it.
    """
    counts = list(start.counts)
    begun = {index for index, count in enumerate(counts) if count}
    try:
        with generation:
            deltas: Sequence[tuple[int, CompletionOutput]] = start.missed
            while deltas or generation.is_running:
                if not deltas:
                    deltas = await generation.receive()
                if deltas:
                    event = await _spelled(generation, builder, begun, counts, deltas)
                    if event:
                        yield event
                    deltas = ()
            if include_usage:
                yield builder.usage_chunk(usage_of(generation.prompts))
    except TopworkError as error:
        if not begun:
            raise
        generation.broke_off()
        yield sse(error_body(error))
    yield SSE_DONE


async def _spelled(
    generation: Generation,
    builder: ResponseBuilder,
    begun: set[int],
    counts: list[int],
    deltas: Sequence[tuple[int, CompletionOutput]],
) -> bytes:
    """Return the events of some deltas; what takes long to spell is spelled in a thread."""

    def spell() -> bytes:
        return b"".join([_chunk(generation, builder, begun, counts, *one) for one in deltas])

    num_scored = sum(len(_scores(generation, one)) for one, _ in deltas if one not in begun)
    return await asyncio.to_thread(spell) if num_scored > INLINE_TOKENS else spell()


def _scores(generation: Generation, index: int) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of the prompt of a choice.

    The first choice computes the prompt for the others, whose tokens come behind its first.
    """
    return generation.prompts[index // len(generation.prompts[0])][0].prompt_logprobs


def _chunk(
    generation: Generation,
    builder: ResponseBuilder,
    begun: set[int],
    counts: list[int],
    index: int,
    delta: CompletionOutput,
) -> bytes:
    processor = generation.processors[index]
    is_first = index not in begun
    begun.add(index)
    counts[index] += len(delta.token_ids)
    prompt, num_cached = processor.request.token_ids, processor.num_cached_tokens
    scores = _scores(generation, index)
    choice = Choice(index, prompt, delta, is_first, counts[index], num_cached, scores)
    chunk = builder.chunk(choice)
    if generation.stream_id is None:
        return chunk
    if not chunk:
        return chunk
    return event_id(generation.stream_id, counts) + chunk


def event_id(stream_id: str, counts: Sequence[int]) -> bytes:
    """Return the line of an event that says how many tokens of each choice its reader has then."""
    return f"id: {stream_id}:{'.'.join(map(str, counts))}\n".encode()


def best(outputs: Sequence[CompletionOutput], n: int) -> list[CompletionOutput]:
    """Return the n whole outputs whose tokens are likeliest on average, the likeliest first.

    Equals keep their order. All outputs have the log-probabilities of their tokens.
    """
    return sorted(outputs, key=lambda one: -fmean(entry.logprob for entry in one.logprobs))[:n]


def usage_of(prompts: Sequence[Sequence[OutputProcessor]]) -> Usage:
    """Return the counts of a call: each prompt once, and all its choices, shown or not.

    The first choice of a prompt computes it for the others, so its cached tokens are the prompt's.
    """
    num_prompt_tokens = sum(len(choices[0].request.token_ids) for choices in prompts)
    num_tokens = sum(choice.num_tokens for choices in prompts for choice in choices)
    num_cached = sum(choices[0].num_cached_tokens for choices in prompts)
    thoughts = [choice.num_reasoning_tokens for choices in prompts for choice in choices]
    counted = [count for count in thoughts if count is not None]
    return Usage(
        num_prompt_tokens,
        num_tokens,
        num_prompt_tokens + num_tokens,
        PromptTokensDetails(num_cached),
        _details(sum(counted) if counted else None),
    )


def _details(num_reasoning_tokens: int | None) -> CompletionTokensDetails | UnsetType:
    if num_reasoning_tokens is None:
        return UNSET
    return CompletionTokensDetails(num_reasoning_tokens)


def shown_token(tokenizer: Tokenizer, token_id: int, as_id: bool) -> str:
    """Return how log-probabilities name a token."""
    return f"token_id:{token_id}" if as_id else tokenizer.token_text(token_id)


def chat_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob], as_ids: bool = False
) -> ChatLogprobs:
    """Return log-probabilities in the shape of chats."""

    def alternative(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            shown_token(tokenizer, token_id, as_ids),
            max(logprob, LOGPROB_FLOOR),
            list(tokenizer.token_bytes(token_id)),
        )

    content = []
    for entry in entries:
        own = alternative(entry.token_id, entry.logprob)
        top = [alternative(token_id, logprob) for token_id, logprob in entry.top]
        content.append(ChatLogprob(own.token, own.logprob, own.bytes, top))
    return ChatLogprobs(content)


class ChunkTemplate:
    """An event of a stream of which nothing changes but its text and its tokens."""

    def __init__(self, make: Callable[[str, tuple[int, ...]], object]) -> None:
        # What a client chose stands before these two markers, so the last matches are they.
        whole = sse(make(_SOME_TEXT, _SOME_TOKENS))
        rest, self._has_tokens, tokens_end = whole.rpartition(_encode(_SOME_TOKENS))
        self._start, marker, text_end = (rest or tokens_end).rpartition(_encode(_SOME_TEXT))
        assert marker, "a template without the marker of the text"
        self._middle = text_end if self._has_tokens else b""
        self._end = tokens_end if self._has_tokens else text_end

    def render(self, text: str, token_ids: tuple[int, ...]) -> bytes:
        """Return the event with this text and, if it has any, these tokens."""
        if self._has_tokens:
            tokens = _encode(token_ids)
            return b"".join((self._start, _encode(text), self._middle, tokens, self._end))
        return b"".join((self._start, _encode(text), self._end))
