"""Which of the scheduler replicas should run a request: one total order, and a bound on its pull.

A replica that is much busier than the others gets nothing more, whatever it has cached. Of the rest
the one that has most of the prompt cached is taken, then one that has the adapter in a slot, then
the adapter's home: each adapter has another one, the same on every router. Knows nothing of
connections.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

LOAD_FACTOR = 1.25  # a replica may have this much of the average load before it is passed over


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of a replica when a request is placed."""

    replica: str
    load: int  # requests that it has
    cached_pages: int  # of the prompt, from its beginning
    is_resident: bool  # it has the adapter in a slot


def affinity(adapter: str, replica: str) -> bytes:
    """Return the weight by which replicas are ranked for an adapter; equal on every router."""
    key = f"{len(adapter)}:{adapter}{replica}".encode()
    return blake2b(key, digest_size=8).digest()


def place(adapter: str, candidates: Sequence[Candidate]) -> Candidate:
    """Return the replica that should run a request of this adapter, in whatever order they come."""
    assert candidates, "somebody must be there"
    total = sum(candidate.load for candidate in candidates) + 1
    bound = LOAD_FACTOR * total / len(candidates)
    # The least loaded one is always under the bound, so that there is a choice.
    free = [candidate for candidate in candidates if candidate.load < bound]
    return max(
        free,
        key=lambda one: (
            one.cached_pages,
            one.is_resident,
            affinity(adapter, one.replica),
            one.replica,
        ),
    )
