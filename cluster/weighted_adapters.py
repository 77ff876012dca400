"""The adapter of a request as text: `base`, a digest, or a weighted sum of several digests.

A sum says all of itself, so that no table of sums is needed: the pool finds its parts in it, and
the prefix cache keys its namespace by it.
"""

from collections.abc import Iterable

from cluster.request import BASE

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
