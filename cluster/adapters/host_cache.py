"""Adapters in host memory: a budget in bytes, pinned ones that stay, the others in LRU order."""

from dataclasses import dataclass
from typing import Any

from cluster.lru import Lru

Shards = tuple[Any, ...]  # handles by rank; when the last goes, so does the memory


@dataclass(slots=True)
class _Resident:
    """An adapter in memory."""

    digest: str
    shards: Shards
    num_bytes: int
    number: int  # in order of arrival


class HostCache:
    """Holds adapters by digest.

    The adapter that came last stays even where it alone is over the budget: whoever brought it is
    about to use it. `budget` is in bytes.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_evicted = 0  # in the life of the tier
        self._residents: dict[str, _Resident] = {}
        self._evictable: Lru[str] = Lru()
        self._held_bytes = 0
        self._arrivals = 0
        self._uses = 0  # the clock of this tier

    def __contains__(self, digest: str) -> bool:
        return digest in self._residents

    @property
    def held_bytes(self) -> int:
        """Bytes of all adapters here."""
        return self._held_bytes

    def use(self, digest: str) -> Shards | None:
        """Return an adapter's shards as those used last, or None if it is not here."""
        resident = self._residents.get(digest)
        if resident is None:
            return None
        if resident.number in self._evictable:
            self._evictable.remove(resident.number)
            self._make_evictable(resident)
        return resident.shards

    def add(self, digest: str, shards: Shards, num_bytes: int, *, is_pinned: bool) -> None:
        """Take an adapter in, as the one used last, and let others go until it fits."""
        self.discard(digest)
        while self._evictable and self._held_bytes + num_bytes > self.budget:
            self._evict()
        self._arrivals += 1
        resident = _Resident(digest, shards, num_bytes, self._arrivals)
        self._residents[digest] = resident
        self._held_bytes += num_bytes
        if not is_pinned:
            self._make_evictable(resident)

    def pin(self, digest: str) -> None:
        """Keep an adapter that may be here."""
        resident = self._residents.get(digest)
        if resident is not None:
            self._evictable.discard(resident.number)

    def unpin(self, digest: str) -> None:
        """Let an adapter that may be here go in its turn."""
        resident = self._residents.get(digest)
        if resident is not None and resident.number not in self._evictable:
            self._make_evictable(resident)
            while self._held_bytes > self.budget and len(self._evictable) > 1:
                self._evict()

    def discard(self, digest: str) -> int:
        """Free an adapter that may be here; return the bytes."""
        resident = self._residents.pop(digest, None)
        if resident is None:
            return 0
        self._held_bytes -= resident.num_bytes
        self._evictable.discard(resident.number)
        return resident.num_bytes

    def pinned(self) -> frozenset[str]:
        """Return what stays."""
        return frozenset(
            digest
            for digest, resident in self._residents.items()
            if resident.number not in self._evictable
        )

    def digests(self) -> frozenset[str]:
        """Return what is here."""
        return frozenset(self._residents)

    def check(self) -> None:
        """Assert that the books agree with what is held."""
        held = sum(resident.num_bytes for resident in self._residents.values())
        assert held == self._held_bytes, f"{held} bytes held, {self._held_bytes} in the books"
        numbers = {resident.number for resident in self._residents.values()}
        evictable = sum(number in self._evictable for number in numbers)
        assert evictable == len(self._evictable), "what is evictable is not here"
        assert held <= self.budget or evictable <= 1, "over the budget with adapters to evict"

    def _evict(self) -> None:
        self._held_bytes -= self._residents.pop(self._evictable.pop()).num_bytes
        self.num_evicted += 1

    def _make_evictable(self, resident: _Resident) -> None:
        self._uses += 1
        self._evictable.add(self._uses, resident.number, resident.digest)
