"""What the two ways to ask for text share: from bodies to requests, and the end of a stream.

Knows nothing of the shapes of either way's responses.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest

from cluster.errors import TopworkError
from cluster.request import Request
from cluster.router.errors_http import error_body
from cluster.router.middleware import request_id_of
from cluster.router.responses import SSE_DONE, sse
from cluster.router.router import Model, Router
from cluster.router.schemas import GenerationBody
from cluster.router.validation import (
    TextOptions,
    answer_length,
    check_lengths,
    check_stream_options,
    sampling_params,
    stop_tokens,
    text_options,
)


@dataclass(frozen=True, slots=True)
class Call:
    """What every message of a response repeats."""

    id: str
    created: int  # seconds since 1970
    model: str
    include_usage: bool
    return_token_ids: bool


def call_of(prefix: str, http: HttpRequest, body: GenerationBody) -> Call:
    """Return what the responses to this body repeat."""
    return Call(
        id=f"{prefix}-{request_id_of(http)}",
        created=int(time.time()),
        model=body.model,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        return_token_ids=bool(body.return_token_ids),
    )


def check_body(body: GenerationBody) -> TextOptions:
    """Return how the answer is to be shown.

    Raises:
        InvalidRequest: for unknown, unsupported and clashing fields.
    """
    body.refuse_extras()
    check_stream_options(body)
    return text_options(body)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the two ways spell differently in their bodies."""

    max_tokens: int | None
    default_max_tokens: int | None  # None: what the context leaves
    num_logprobs: int | None  # None: no log-probabilities


def make_requests(
    router: Router,
    http: HttpRequest,
    body: GenerationBody,
    model: Model,
    prompts: list[tuple[int, ...]],
    wanted: Wanted,
) -> list[Request]:
    """Return one request for each prompt.

    Raises:
        InvalidRequest: if tokens are not in the vocabulary or the context is too short.
    """
    stops = stop_tokens(body, router.config)
    sampling = sampling_params(body, wanted.num_logprobs, stops, router.config)
    requests = []
    for token_ids in prompts:
        length = answer_length(
            len(token_ids), wanted.max_tokens, wanted.default_max_tokens, router.config
        )
        check_lengths(body, length)
        requests.append(
            Request(
                request_id=router.unique_id(request_id_of(http)),
                adapter=model.adapter,
                token_ids=token_ids,
                sampling=sampling,
                max_tokens=length,
                stop_token_ids=stops,
                cache_salt=body.cache_salt or "",
            )
        )
    return requests


async def with_end(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yield a stream's events and its end; an error after the first event becomes one.

    An error before the first event is raised: the HTTP status can still tell it.
    """
    async with aclosing(events):
        yield await anext(events)
        try:
            async for event in events:
                yield event
        except TopworkError as error:
            yield sse(error_body(error))
        yield SSE_DONE
