"""How a response is read: at once, as a stream, or by nobody in the background."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.api.http import event_stream, json_response, unless_disconnected
from cluster.api.responses.events import ResponseEvents
from cluster.api.responses.stored import StoredResponse, replay
from cluster.errors import Conflict, TopworkError
from cluster.router.generation import ClaimedCall, Generation
from cluster.router.router import Router
from cluster.router.tenancy.admission import Admission

NOTHING = b": nothing so far\n\n"  # a comment: a stream needs something to begin with


async def answer_whole(
    http: HttpRequest, generation: Generation, events: ResponseEvents
) -> Response:
    """Answer when the response has ended; it ends with its client."""

    async def work() -> Response:
        with generation:
            while generation.is_running:
                await _grow(generation, events)
        return json_response(events.response())

    return await unless_disconnected(http, work())


async def answer_begun(
    http: HttpRequest, router: Router, generation: Generation, events: ResponseEvents
) -> Response:
    """Answer when a scheduler has let the response in, which goes on in the background."""

    async def work() -> Response:
        async with aclosing(_events(router, generation, events, None, True)) as reading:
            await anext(reading)
        return json_response(events.response())

    return await unless_disconnected(http, work())


async def answer_stream(
    http: HttpRequest,
    router: Router,
    generation: Generation,
    events: ResponseEvents,
    in_background: bool,
) -> Response:
    """Answer with the events of a response that begins."""
    reading = _events(router, generation, events, None, in_background)
    return await unless_disconnected(http, event_stream(reading))


async def answer_ended(
    http: HttpRequest, router: Router, stored: StoredResponse, after: int
) -> Response:
    """Answer with the events behind a number, of a response that has ended."""
    events, processor = stored.events(router, after)
    reading = _never_nothing(replay(events, processor, stored.past))
    return await unless_disconnected(http, event_stream(reading))


async def answer_claimed(
    http: HttpRequest,
    router: Router,
    call: ClaimedCall,
    stored: StoredResponse,
    after: int,
    admission: Admission | None,
) -> Response:
    """Answer with the events behind a number, of a response that goes on."""

    async def work() -> Response:
        is_replayed = False
        try:
            generation = stored.generation(router, admission).claimed(call)
            processor = generation.processors[0]
            events = ResponseEvents(stored.record, router.tokenizer, processor, after)
            past = [part async for part in replay(events, processor, stored.past)]
            is_replayed = True
        finally:
            if not is_replayed:
                call.release(stored.record.id)
        reading = _events(
            router, generation, events, b"".join(past), stored.record.settings.background
        )
        return await event_stream(reading)

    return await unless_disconnected(http, work())


async def _events(
    router: Router,
    generation: Generation,
    events: ResponseEvents,
    past: bytes | None,
    in_background: bool,
) -> AsyncGenerator[bytes]:
    """Yield the events of a response, those that are here together as one.

    Args:
        past: the events before; None: it begins, and what keeps it out is raised: the HTTP status
            can still carry it.
        in_background: it goes on when it is read no more.
    """
    cause: BaseException | None = None
    is_left = False
    generation.__enter__()
    try:
        if past is None:
            opening = events.opening()
            while not generation.is_let_in and generation.is_running:
                opening += await _grow(generation, events)
            past = opening
        yield past or NOTHING
        while generation.is_running:
            grown = await _grow(generation, events)
            if grown:
                yield grown
    except TopworkError as error:
        cause = error
        if past is None:
            raise
        generation.broke_off()
        yield events.break_off(error) if isinstance(error, Conflict) else events.fail(error)
    except (asyncio.CancelledError, GeneratorExit) as error:
        cause = error
        if in_background:
            router.background.read_on(generation)
            is_left = True
        raise
    finally:
        if not is_left:
            generation.leave(cause)


async def _grow(generation: Generation, events: ResponseEvents) -> bytes:
    return b"".join([events.grow(delta) for _, delta in await generation.receive()])


async def _never_nothing(parts: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yield what is not empty, or one comment."""
    is_empty = True
    async with aclosing(parts):
        async for part in parts:
            if part:
                is_empty = False
                yield part
    if is_empty:
        yield NOTHING
