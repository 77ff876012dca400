"""What the two ways to ask for text share: from bodies to requests.

Knows nothing of the shapes of either way's responses.
"""

import time
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest

from cluster.api.choices import Choices, seeded
from cluster.api.request_ids import request_id_of
from cluster.request import Request
from cluster.router.auth import Principal
from cluster.router.model_names import Model
from cluster.router.router import Router
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
    num_logprobs: int | None  # shown; None: no log-probabilities
    choices: Choices


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, with what rights, and under which id."""

    principal: Principal
    request_id: str


async def chosen_model(router: Router, caller: Caller, body: GenerationBody) -> Model:
    """Return what the names in a body stand for; raises as ModelResolver.resolve."""
    return await router.models.resolve(body.model, body.lora, caller.principal, caller.request_id)


def make_requests(
    router: Router,
    caller: Caller,
    body: GenerationBody,
    model: Model,
    prompts: list[tuple[int, ...]],
    wanted: Wanted,
) -> list[tuple[Request, ...]]:
    """Return for each prompt the requests of its choices.

    Raises:
        InvalidRequest: if tokens are not in the vocabulary or the context is too short.
        Forbidden: if the caller may not have the priority.
    """
    principal = caller.principal
    priority = principal.priority(body.priority)
    stops = stop_tokens(body, router.config)
    num_logprobs = wanted.num_logprobs
    if num_logprobs is None and wanted.choices.are_ranked:
        num_logprobs = 0
    samplings = seeded(
        sampling_params(body, num_logprobs, stops, router.config), wanted.choices.best_of
    )
    requests = []
    for token_ids in prompts:
        length = answer_length(
            len(token_ids), wanted.max_tokens, wanted.default_max_tokens, router.config
        )
        check_lengths(body, length)
        requests.append(
            tuple(
                Request(
                    request_id=router.unique_id(caller.request_id),
                    adapter=model.adapter,
                    token_ids=token_ids,
                    sampling=sampling,
                    max_tokens=length,
                    stop_token_ids=stops,
                    cache_salt=body.cache_salt or "",
                    priority=priority,
                    tenant=principal.tenant,
                    weight=principal.weight,
                    adapter_bytes=model.adapter_bytes,
                )
                for sampling in samplings
            )
        )
    return requests
