"""GET /v1/streams/{id}: a stream is read on after its connection broke, whichever router had it."""

import time
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.api.auth import Authenticator
from cluster.api.error_handlers import ErrorReply
from cluster.api.middleware.rate_limits import reading_on
from cluster.api.openapi.operation import OF_STREAMS, READING, Operation, Parameter, declared
from cluster.api.response_builder import Begun, Choice, ResponseBuilder, stream_response
from cluster.api.responses.record import is_response_id
from cluster.api.resumable import StreamRecord, counts_of, fed, record_of, unknown_stream
from cluster.api.routes.chat import ChatResponseBuilder
from cluster.api.routes.completions import CompletionResponseBuilder
from cluster.api.schemas.responses import ChatChunk, Completion
from cluster.errors import TopworkError, error_from
from cluster.messages import Keep
from cluster.request import TokenEvent
from cluster.router.generation import ClaimedCall, Generation
from cluster.router.model_resolver import ResolvedModel
from cluster.router.output_processor import CompletionOutput
from cluster.router.router import Router
from cluster.router.tenancy.admission import Admission

READ_ON = Operation(
    tag="inference",
    summary="Reads a resumable stream on after its connection broke.",
    right="any",
    events=(ChatChunk, Completion, ErrorReply),
    errors=READING,
    parameters=(
        Parameter(
            "Last-Event-ID", {"type": "string"}, "the id of the last event there is", "header"
        ),
    ),
    headers=OF_STREAMS,
)


def stream_routes(router: Router, keys: Authenticator) -> APIRouter:
    """Return the route by which broken streams go on."""
    routes = APIRouter()

    @routes.get("/v1/streams/{stream_id}", openapi_extra=declared(READ_ON))
    async def read_on(http: HttpRequest, stream_id: str) -> Response:
        principal = keys.authenticate(http)
        # A response has its own way to be read on.
        kept = None if is_response_id(stream_id) else await router.kept.look(stream_id)
        if kept is None:
            raise unknown_stream(stream_id)
        # Before it is claimed: that would take it from its reader, for whoever knows its id.
        record = record_of(kept.record, principal, stream_id)
        call = await router.kept.claim(stream_id)
        if call is None:
            raise unknown_stream(stream_id)
        try:
            counts = _counts(call, stream_id, http.headers.get("last-event-id", ""))
            admission = reading_on(router, principal)
            generation = _generation(router, call, record, stream_id, admission)
            builder = _builder(router, record)
            begun = Begun(counts, _missed(generation, call.claimed.events, counts, builder))
        except TopworkError:
            call.release(stream_id)
            raise
        return await stream_response(
            http, generation, builder, record.metadata.include_usage, begun
        )

    return routes


def _builder(router: Router, record: StreamRecord) -> ResponseBuilder:
    tokenizer, metadata, shows_logprobs = router.tokenizer, record.metadata, record.shows_logprobs
    if record.endpoint == "chat":
        return ChatResponseBuilder(tokenizer, metadata, shows_logprobs, record.message_format)
    return CompletionResponseBuilder(tokenizer, metadata, shows_logprobs)


def _counts(call: ClaimedCall, stream_id: str, last_event_id: str) -> list[int]:
    """Return how many tokens of each choice the reader has.

    Raises:
        InvalidRequest: if it names no event of this stream.
        TopworkError: what the call has ended with.
    """
    for events in call.claimed.events:
        if events and events[-1].error is not None:
            raise error_from(events[-1].error)
    totals = [sum(len(e.token_ids) for e in events) for events in call.claimed.events]
    return counts_of(stream_id, last_event_id, totals)


def _generation(
    router: Router,
    call: ClaimedCall,
    record: StreamRecord,
    stream_id: str,
    admission: Admission | None,
) -> Generation:
    requests = call.claimed.requests
    model = ResolvedModel(record.names, requests[0].adapter, requests[0].adapter_bytes)
    keep = Keep(stream_id, router.config.stream_keep, call.claimed.record)
    generation = router.generate(
        model, [requests], record.options, time.monotonic(), keep, admission=admission
    )
    return generation.claimed(call)


def _missed(
    generation: Generation,
    events: Sequence[Sequence[TokenEvent]],
    counts: list[int],
    builder: ResponseBuilder,
) -> list[tuple[int, CompletionOutput]]:
    """Give the processors all events so far; return what their reader lacks of each choice."""
    missed = []
    for index, (processor, of_one) in enumerate(zip(generation.processors, events, strict=True)):
        has, lacks = fed(processor, of_one, counts[index])
        if has is not None:  # for the offsets of what follows
            builder.chunk(Choice(index, processor.request.token_ids, has, is_first=True))
        if lacks is not None:
            missed.append((index, lacks))
    return missed
