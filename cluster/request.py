"""What a client asked and what it gets back, token by token; frozen messages without behaviour."""

from typing import Literal

import msgspec

from cluster.errors import BY_NAME, Internal, TopworkError
from worker.protocol import SamplingParams

BASE = "base"  # the adapter that is no adapter: the base model itself

PRIORITY_MIN, PRIORITY_MAX = -(2**31), 2**31 - 1

FinishReason = Literal["stop", "length", "abort", "error"]


class Request(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One prompt to continue, already authenticated, validated, resolved and tokenized."""

    request_id: str  # unique per router connection
    adapter: (
        str  # BASE, an adapter's hex digest, or a sum of several: see cluster.weighted_adapters
    )
    token_ids: tuple[int, ...]  # the prompt; at least one
    sampling: SamplingParams
    max_tokens: int  # at least 1
    stop_token_ids: tuple[int, ...] = ()  # end the answer; the router adds the model's eos ids
    cache_salt: str = ""  # requests with different salts never share a prefix
    priority: int = 0  # smaller goes first; among equals, fairness or else arrival decides
    tenant: str = ""  # whose request it is, for fairness; "": nobody's in particular
    weight: int = 1  # share of the tenant's use of the adapter beside others; at least 1
    adapter_bytes: int = 0  # that the adapter claims on each rank, at most


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A TopworkError on the wire; `name` is a key of cluster.errors.BY_NAME."""

    name: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None


def error_from(info: ErrorInfo) -> TopworkError:
    """Return an error from the wire as an exception; one of an unknown name is Internal."""
    return BY_NAME.get(info.name, Internal)(info.message, info.param, info.code, info.retry_after)


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """News of one request after one step; the last one carries `finish_reason`.

    A stop token that ended the answer is among `token_ids`. `error` comes with finish_reason
    "error" and with no token.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()  # of token_ids, if asked for
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()  # of token_ids, if asked for
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache; set on the first event
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
