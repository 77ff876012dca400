"""Streams that can be read on after their connection broke: `stream_options.resumable`.

Each event carries an id: the stream's, which nobody can guess, and how many tokens of each choice
the reader has with it. What an answer's first tokens say does not depend on what follows, so a
router that has never seen the call can leave out what the reader has, to the token.
"""

import secrets
from collections.abc import Sequence
from typing import Literal

import msgspec

from cluster.api.request_builder import Call
from cluster.api.response_builder import ResponseMetadata
from cluster.errors import InvalidRequest, NotFound
from cluster.messages import Keep
from cluster.request import TokenEvent
from cluster.router.config import RouterConfig
from cluster.router.model_resolver import ResolvedModel
from cluster.router.output_processor import CompletionOutput, OutputProcessor, TextOptions
from cluster.router.parser.families import MessageFormat
from cluster.router.tenancy.principal import Principal

_ID_BYTES = 18


class StreamRecord(msgspec.Struct, frozen=True):
    """What a router must know to go on with a call that another one began."""

    endpoint: Literal["chat", "completions"]
    tenant: str
    names: tuple[str, ...]  # of the model, as metrics count it
    metadata: ResponseMetadata
    options: TextOptions
    shows_logprobs: bool
    message_format: MessageFormat | None = None  # of chats


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(StreamRecord)


def keep_of(
    call: Call,
    model: ResolvedModel,
    num_prompts: int,
    endpoint: Literal["chat", "completions"],
    metadata: ResponseMetadata,
    config: RouterConfig,
    shows_logprobs: bool,
    message_format: MessageFormat | None = None,
) -> Keep | None:
    """Return how a call is kept for a reader that comes back, if it is to be.

    Raises:
        InvalidRequest: if the call has several prompts, which several schedulers may have.
    """
    options = call.body.stream_options
    if options is None or not options.resumable:
        return None
    if num_prompts > 1:
        raise InvalidRequest(
            "stream_options.resumable: only with a single prompt", "stream_options.resumable"
        )
    record = StreamRecord(
        endpoint=endpoint,
        tenant=call.principal.tenant,
        names=model.names,
        metadata=metadata,
        options=call.text_options,
        shows_logprobs=shows_logprobs,
        message_format=message_format,
    )
    return Keep(secrets.token_urlsafe(_ID_BYTES), config.stream_keep, _encode(record))


def record_of(data: bytes, principal: Principal, stream_id: str) -> StreamRecord:
    """Return what was kept of a call.

    Raises:
        NotFound: if it is another tenant's.
    """
    record = _decoder.decode(data)
    if record.tenant != principal.tenant:
        raise unknown_stream(stream_id)
    return record


def unknown_stream(stream_id: str) -> NotFound:
    """Return the error for a stream that is not kept, or not for the caller."""
    return NotFound(f"there is no stream {stream_id[:100]!r}, or no more", param="stream_id")


def counts_of(stream_id: str, last_event_id: str, totals: Sequence[int]) -> list[int]:
    """Return how many tokens of each choice a reader has; none, if it names no event.

    Raises:
        InvalidRequest: if it is no id of an event of this stream.
    """
    if not last_event_id:
        return [0] * len(totals)
    name, _, text = last_event_id.rpartition(":")
    parts = text.split(".")
    is_sound = name == stream_id and len(parts) == len(totals)
    if is_sound and all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        counts = [int(part) for part in parts]
        if all(count <= total for count, total in zip(counts, totals, strict=True)):
            return counts
    raise InvalidRequest(f"{last_event_id[:100]!r} is no event of this stream", "Last-Event-ID")


def joined(events: Sequence[TokenEvent]) -> TokenEvent:
    """Return events of one request as a single one."""
    assert events, "nothing to join"
    has_logprobs = all(event.logprobs or not event.token_ids for event in events)
    return TokenEvent(
        events[0].request_id,
        tuple(token for event in events for token in event.token_ids),
        tuple(one for event in events for one in event.logprobs) if has_logprobs else (),
        tuple(one for event in events for one in event.top_logprobs) if has_logprobs else (),
        events[0].num_cached_tokens,
        events[-1].finish_reason,
        events[-1].error,
    )


def fed(
    processor: OutputProcessor, events: Sequence[TokenEvent], count: int
) -> tuple[CompletionOutput | None, CompletionOutput | None]:
    """Give a processor all events so far; return what the reader has, and what it lacks."""
    if not events:
        return None, None
    event = joined(events)
    has = lacks = None
    if count:
        has = processor.process(_part(event, 0, count))
    is_whole = count == len(event.token_ids)
    if processor.finish_reason is None and not (is_whole and event.finish_reason is None):
        lacks = processor.process(_part(event, count, len(event.token_ids)))
    return has, lacks


def _part(event: TokenEvent, start: int, end: int) -> TokenEvent:
    is_end = end == len(event.token_ids)
    return TokenEvent(
        event.request_id,
        event.token_ids[start:end],
        event.logprobs[start:end],
        event.top_logprobs[start:end],
        event.num_cached_tokens,
        event.finish_reason if is_end and start < end else None,
    )
