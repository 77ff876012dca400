"""Responses that are kept: found for their tenant, and followed again from their tokens."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from math import inf

from cluster.api.responses.body import ResponseBody
from cluster.api.responses.events import ResponseEvents
from cluster.api.responses.items import Turn, turns_of
from cluster.api.responses.record import (
    ResponseRecord,
    is_response_id,
    keep_of,
    record_of,
    unknown_response,
)
from cluster.errors import InvalidRequest, NotFound, error_from
from cluster.messages import Claimed
from cluster.request import TokenEvent
from cluster.router.generation import Generation
from cluster.router.model_resolver import ResolvedModel
from cluster.router.output_processor import OutputProcessor, by_token
from cluster.router.router import Router
from cluster.router.tenancy.admission import Admission
from cluster.router.tenancy.principal import Principal

TOKENS_AT_ONCE = 256  # of a replay, before others have their turn


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as a scheduler keeps it at some moment."""

    record: ResponseRecord
    claimed: Claimed

    @property
    def past(self) -> tuple[TokenEvent, ...]:
        """All events of its answer so far."""
        return self.claimed.events[0]

    @property
    def has_ended(self) -> bool:
        """Whether there is no more to come."""
        return bool(self.past) and self.past[-1].finish_reason is not None

    def events(self, router: Router, after: float = inf) -> tuple[ResponseEvents, OutputProcessor]:
        """Return what is to be fed with its past."""
        processor = OutputProcessor(router.tokenizer, self.claimed.requests[0], self.record.options)
        return ResponseEvents(self.record, router.tokenizer, processor, after), processor

    def generation(self, router: Router, admission: Admission | None) -> Generation:
        """Return the context in which it goes on; `admission` counts the rest of it."""
        (request,) = self.claimed.requests
        model = ResolvedModel(self.record.names, request.adapter, request.adapter_bytes)
        keep = keep_of(self.record, router.config)
        options, now = self.record.options, time.monotonic()
        return router.generate(
            model, [(request,)], options, now, keep, is_by_token=True, admission=admission
        )

    async def followed(self, router: Router) -> ResponseEvents:
        """Return the response with its past."""
        events, processor = self.events(router)
        async for _ in replay(events, processor, self.past):
            pass
        return events


async def find(router: Router, principal: Principal, response_id: str) -> StoredResponse:
    """Return a response of the caller's tenant.

    Raises:
        NotFound: if there is none.
        Unavailable: if a scheduler that may have it does not answer.
    """
    claimed = await router.kept.look(response_id) if is_response_id(response_id) else None
    if claimed is None:
        raise unknown_response(response_id)
    return StoredResponse(record_of(claimed.record, principal, response_id), claimed)


async def whole_conversation(
    router: Router, principal: Principal, body: ResponseBody
) -> list[Turn]:
    """Return the turns of a call, behind those of the response that it goes on with, if any.

    Raises:
        InvalidRequest: as `turns_of` and `conversation_of`.
        Unavailable: as `find`.
    """
    turns: list[Turn] = []
    if body.previous_response_id is not None:
        turns = await conversation_of(router, principal, body.previous_response_id)
    return turns + turns_of(body.input)


async def conversation_of(router: Router, principal: Principal, response_id: str) -> list[Turn]:
    """Return the conversation up to and with the answer of a response that has ended.

    Raises:
        InvalidRequest: if there is none, or it cannot be gone on with; OpenAI answers 400, too.
        Unavailable: as `find`.
    """
    try:
        stored = await find(router, principal, response_id)
    except NotFound:
        raise InvalidRequest(
            f"Previous response with id {response_id[:100]!r} not found.",
            "previous_response_id",
            "previous_response_not_found",
        ) from None
    events = await stored.followed(router)
    if events.status not in ("completed", "incomplete"):
        raise InvalidRequest(
            f"previous_response_id: that response is {events.status}; only one that is completed "
            "or incomplete can be gone on with",
            "previous_response_id",
        )
    return [*stored.record.conversation(), events.turn()]


async def replay(
    events: ResponseEvents, processor: OutputProcessor, past: tuple[TokenEvent, ...]
) -> AsyncGenerator[bytes]:
    """Feed a response with its past; yield the events that are not left out, some at a time."""
    parts = [events.opening()]
    num_tokens = 0
    for event in past:
        if event.error is not None:
            parts.append(events.fail(error_from(event.error)))
            break
        for part in by_token(event):
            delta = processor.process(part)
            if delta is not None:
                parts.append(events.grow(delta))
            if events.has_ended:
                break
            num_tokens += 1
            if num_tokens % TOKENS_AT_ONCE == 0:
                yield b"".join(parts)
                parts.clear()
                await asyncio.sleep(0)
        if events.has_ended:
            break
    yield b"".join(parts)
