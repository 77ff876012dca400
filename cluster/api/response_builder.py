"""From the pieces of a call's answers to its response, whole or streamed.

Owns which piece belongs to which choice, and their order. How a message is spelled is a Form's.
Knows nothing of schedulers.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.api.choices import Choices, best
from cluster.api.http import event_stream, unless_disconnected
from cluster.api.schemas.responses import SSE_DONE, Usage, sse, usage_of
from cluster.errors import TopworkError
from cluster.router.error_responses import error_body
from cluster.router.generation import Generation
from cluster.router.output_processor import OutputDelta


class Choice(msgspec.Struct, frozen=True, gc=False):
    """What one choice of a response says, or what it grows by."""

    index: int
    prompt: tuple[int, ...]  # token ids
    piece: OutputDelta
    is_first: bool  # nothing of this choice has been sent before


class Form(Protocol):
    """How one of the two ways to ask for text spells its messages; serves one call."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> object:
        """Return the response that tells everything at once."""
        ...

    def event(self, choice: Choice) -> bytes:
        """Return the event of a stream that tells what a choice grew by."""
        ...

    def usage_event(self, usage: Usage) -> bytes:
        """Return the event of a stream that tells the usage, after all choices have ended."""
        ...


async def whole_response(
    http: HttpRequest, generation: Generation, choices: Choices, form: Form
) -> Response:
    """Answer the call at once, when all its answers have ended."""
    return await unless_disconnected(http, _whole(generation, choices, form))


async def stream_response(
    http: HttpRequest, generation: Generation, form: Form, include_usage: bool
) -> Response:
    """Answer the call with a stream of events, one for each piece."""
    events = _events(generation, form, include_usage)
    return await unless_disconnected(http, event_stream(events))


async def _whole(generation: Generation, choices: Choices, form: Form) -> Response:
    pieces: list[list[OutputDelta]] = [[] for _ in generation.answers]
    with generation:
        while generation.is_running:
            for index, piece in await generation.receive():
                pieces[index].append(piece)
    answers = [_joined(grown) for grown in pieces]
    shown: list[Choice] = []
    for start in range(0, len(answers), choices.best_of):
        prompt = generation.answers[start].request.token_ids
        of_prompt = answers[start : start + choices.best_of]
        for piece in best(of_prompt, choices.n) if choices.are_ranked else of_prompt:
            shown.append(Choice(len(shown), prompt, piece, is_first=True))
    body = form.whole(shown, usage_of(generation.prompts))
    return Response(msgspec.json.encode(body), media_type="application/json")


def _joined(pieces: list[OutputDelta]) -> OutputDelta:
    return OutputDelta(
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
        finish_reason=pieces[-1].finish_reason,
        stop_reason=pieces[-1].stop_reason,
    )


async def _events(generation: Generation, form: Form, include_usage: bool) -> AsyncGenerator[bytes]:
    """Yield a stream's events, those that are here together as one, and its end.

    An error after the first event becomes one. An error before the first event is raised: the HTTP
    status can still tell it.
    """
    begun: set[int] = set()
    try:
        with generation:
            while generation.is_running:
                pieces = await generation.receive()
                if pieces:
                    yield b"".join([_event(generation, form, begun, *piece) for piece in pieces])
            if include_usage:
                yield form.usage_event(usage_of(generation.prompts))
    except TopworkError as error:
        if not begun:
            raise
        generation.broke_off()
        yield sse(error_body(error))
    yield SSE_DONE


def _event(
    generation: Generation, form: Form, begun: set[int], index: int, piece: OutputDelta
) -> bytes:
    prompt = generation.answers[index].request.token_ids
    is_first = index not in begun
    begun.add(index)
    return form.event(Choice(index, prompt, piece, is_first))
