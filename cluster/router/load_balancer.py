"""Which scheduler replica gets a request: the choice by prefix, adapter and load.

Remembers which leading pages of prompts have been sent where; the order of choice is total, and the
pull of a prefix bounded.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from cluster.request import Request

LOAD_FACTOR = 1.25  # a replica may have this much of the average load before it is passed over
MAX_PAGES = 256  # of one prompt: what differs later decides nothing here
CAPACITY = 65_536  # pages


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of a replica when one is chosen for a request."""

    replica: str
    load: int  # requests that it has
    cached_pages: int  # of the prompt, from its beginning
    is_resident: bool  # it has the adapter in a slot


def rendezvous_weight(adapter: str, replica: str) -> bytes:
    """Return the weight by which replicas are ranked for an adapter; equal on every router."""
    key = f"{len(adapter)}:{adapter}{replica}".encode()
    return blake2b(key, digest_size=8).digest()


def choose_replica(adapter: str, candidates: Sequence[Candidate]) -> Candidate:
    """Return the replica that should run a request of this adapter, in whatever order they come."""
    assert candidates, "no replica to choose from"
    total = sum(candidate.load for candidate in candidates) + 1
    bound = LOAD_FACTOR * total / len(candidates)
    # The least loaded one is always under the bound, so that there is a choice.
    eligible = [candidate for candidate in candidates if candidate.load < bound]
    return max(
        eligible,
        key=lambda one: (
            one.cached_pages,
            one.is_resident,
            rendezvous_weight(adapter, one.replica),
            one.replica,
        ),
    )


class PrefixAffinity:
    """Leading pages by their chained digest, least recently sent ones forgotten first."""

    def __init__(self, page_size: int, capacity: int = CAPACITY) -> None:
        self._page_size = page_size  # tokens
        self._capacity = capacity
        self._replicas: OrderedDict[bytes, dict[str, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def chain(self, request: Request) -> tuple[bytes, ...]:
        """Return the digests of a prompt's whole pages, each of all that leads to its end.

        The last token of a prompt is always computed, so that a page which ends with it is no help.
        """
        size = self._page_size
        num_pages = min((len(request.token_ids) - 1) // size, MAX_PAGES)
        if num_pages <= 0:
            return ()
        # Framed, so that no salt can spell an adapter, nor tokens the end of a salt.
        adapter, salt = request.adapter, request.cache_salt.encode("utf-8", "surrogatepass")
        digest = blake2b(f"{len(adapter)}:{len(salt)}:{adapter}".encode() + salt, digest_size=16)
        tokens = array("Q", request.token_ids[: num_pages * size]).tobytes()
        pages = []
        for page in range(num_pages):
            digest.update(tokens[page * size * 8 : (page + 1) * size * 8])
            pages.append(digest.copy().digest())
        return tuple(pages)

    def matched(self, chain: tuple[bytes, ...]) -> dict[str, int]:
        """Return how many pages of a chain each replica got, from its beginning without a gap."""
        matched: dict[str, int] = {}
        for index, page in enumerate(chain):
            replicas = self._replicas.get(page)
            if replicas is None:
                break
            for replica in replicas:
                if matched.get(replica, 0) == index:
                    matched[replica] = index + 1
        return matched

    def note(self, chain: tuple[bytes, ...], replica: str) -> None:
        """Remember that a replica gets these pages."""
        for page in reversed(chain):  # the beginning is touched last, so that it goes last
            self._replicas.setdefault(page, {})[replica] = None
            self._replicas.move_to_end(page)
        while len(self._replicas) > self._capacity:
            self._replicas.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Forget what a replica got: it is gone, and its caches with it."""
        for page, replicas in list(self._replicas.items()):
            if replicas.pop(replica, 0) is None and not replicas:
                del self._replicas[page]
