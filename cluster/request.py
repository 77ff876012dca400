"""What a client asked and what it gets back, token by token; frozen messages without behaviour.

The adapter of a request is text: `base`, a digest, or a weighted sum of several digests. A sum says
all of itself, so that no table of sums is needed: the pool finds its parts in it, and the prefix
cache keys its namespace by it.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from cluster.errors import ErrorInfo
from worker.protocol import SamplingParams, TokenLogprobs

BASE = "base"  # the adapter that is no adapter: the base model itself

PRIORITY_MIN, PRIORITY_MAX = -(2**31), 2**31 - 1

FinishReason = Literal["stop", "length", "abort", "error"]


class Request(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One prompt to continue, already authenticated, validated, resolved and tokenized."""

    request_id: str  # unique per router connection
    adapter: str  # BASE, an adapter's hex digest, or a sum of several: see `compose`
    token_ids: tuple[int, ...]  # the prompt; at least one
    sampling: SamplingParams
    max_tokens: int  # at least 1
    stop_token_ids: tuple[int, ...] = ()  # end the answer; the router adds the model's eos ids
    cache_salt: str = ""  # requests with different salts never share a prefix
    priority: int = 0  # smaller goes first; among equals, fairness or else arrival decides
    tenant: str = ""  # whose request it is, for fairness; "": nobody's in particular
    weight: int = 1  # share of the tenant's use of the adapter beside others; at least 1
    adapter_bytes: int = 0  # that the adapter claims on each rank, at most
    # What the client has been given, by ranks or a scheduler that are lost: it goes on behind that.
    output_token_ids: tuple[int, ...] = ()
    elapsed: float = 0.0  # seconds that it had taken when it was lost: its time limit goes on


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
    # Of the prompt's tokens from the second on, if asked for; on the first event with a token.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # Of the prompt, if its sampling pools: [H], or [labels] of a head, float32, little-endian.
    pooled: bytes = b""


Part = tuple[str, float]  # digest and weight


def compose(parts: Iterable[Part]) -> str:
    """Return the adapter that is a weighted sum of others, in the one way of writing it.

    The order of the parts does not matter, weights of equal digests are added, parts of weight 0
    are left out, and what is left may be a single adapter or the base model itself.
    """
    weights: dict[str, float] = {}
    for digest, weight in sorted(parts):
        if digest != BASE:
            weights[digest] = weights.get(digest, 0.0) + weight
    kept = [(digest, weight) for digest, weight in weights.items() if weight != 0.0]
    if not kept:
        return BASE
    if len(kept) == 1 and kept[0][1] == 1.0:
        return kept[0][0]
    return ",".join(f"{digest}:{weight!r}" for digest, weight in kept)


def parts_of(adapter: str) -> tuple[Part, ...]:
    """Return the digests in an adapter with their weights, ordered by digest; none for `base`."""
    if adapter == BASE:
        return ()
    parts = []
    for part in adapter.split(","):
        digest, _, weight = part.partition(":")
        parts.append((digest, float(weight) if weight else 1.0))
    return tuple(parts)


def has_part(adapter: str, digest: str) -> bool:
    """Tell whether an adapter is this one or a sum with it."""
    if ":" not in adapter:  # no sum: this is asked of thousands
        return adapter == digest
    return any(part == digest for part, _ in parts_of(adapter))
