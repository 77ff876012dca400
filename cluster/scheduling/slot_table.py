"""Which adapter is in which slot of the ranks' banks, and who holds it there.

An adapter that is loading, leased or pinned keeps its slot; the others may be evicted, in the
order of the one LRU policy. Knows nothing of requests, nor of how bytes reach a rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from cluster.scheduling.lru import Lru


@dataclass(slots=True)
class Resident:
    """An adapter in a slot."""

    digest: str
    slot: int
    given: int  # step at which it got the slot
    last_use: int  # step of the last lease taken or given back, or of the end of the load
    loading: bool = True
    pinned: bool = False
    leases: int = 0  # running sequences that hold the adapter
    served_since: int | None = None  # step of the first lease after the load

    @property
    def is_idle(self) -> bool:
        """Whether nothing but the LRU order decides how long it stays."""
        return not (self.loading or self.pinned or self.leases)


class SlotTable:
    """Slots [0, num_slots): free, or with one adapter each."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_loads = 0  # in the life of the table
        self.longest_turn_start = 0  # steps from a slot's hand-over to its first lease or loss
        self._free = list(range(num_slots))  # a heap: smallest slot first
        self._residents: dict[str, Resident] = {}
        self._pinned: dict[str, None] = {}  # resident or not
        self._idle: Lru[Resident] = Lru()

    @property
    def has_free(self) -> bool:
        """Whether some slot has no adapter."""
        return bool(self._free)

    @property
    def num_pinned(self) -> int:
        """Adapters that are or will be pinned in a slot."""
        return len(self._pinned)

    def get(self, digest: str) -> Resident | None:
        """Return the adapter's residence, if it has one."""
        return self._residents.get(digest)

    def is_ready(self, digest: str) -> bool:
        """Whether a plan may use the adapter."""
        resident = self._residents.get(digest)
        return resident is not None and not resident.loading

    def residents(self) -> list[Resident]:
        """Return all adapters in slots, by slot."""
        return sorted(self._residents.values(), key=lambda resident: resident.slot)

    def idle(self) -> Iterator[Resident]:
        """Yield the adapters that may be evicted, the one that goes first at the front."""
        return iter(self._idle)

    def reserve(self, digest: str, step: int) -> int:
        """Begin to load an adapter into the smallest free slot and return the slot."""
        assert digest not in self._residents, f"adapter {digest} is resident already"
        slot = heappop(self._free)
        self._residents[digest] = Resident(digest, slot, step, step, pinned=digest in self._pinned)
        self.num_loads += 1
        return slot

    def loaded(self, digest: str, step: int) -> None:
        """Let plans use an adapter whose load is complete on every rank."""
        resident = self._residents[digest]
        assert resident.loading, f"adapter {digest} was not loading"
        resident.loading = False
        resident.last_use = step
        self._sort(resident)

    def lease(self, digest: str, step: int) -> int:
        """Hold a ready adapter for one more sequence and return its slot."""
        resident = self._residents[digest]
        assert not resident.loading, f"adapter {digest} is not ready"
        resident.leases += 1
        resident.last_use = step
        if resident.served_since is None:
            resident.served_since = step
            self._note_turn_start(resident, step)
        self._sort(resident)
        return resident.slot

    def release(self, digest: str, step: int) -> None:
        """Give back one lease."""
        resident = self._residents[digest]
        assert resident.leases > 0, f"adapter {digest} is released more often than leased"
        resident.leases -= 1
        resident.last_use = step
        self._sort(resident)

    def free(self, digest: str, step: int) -> int:
        """Take an adapter that nobody holds out of its slot and return the slot."""
        resident = self._residents[digest]
        if resident.served_since is None:
            self._note_turn_start(resident, step)
        assert resident.leases == 0, f"adapter {digest} is freed under its sequences"
        del self._residents[digest]
        if resident.slot in self._idle:
            self._idle.remove(resident.slot)
        heappush(self._free, resident.slot)
        return resident.slot

    def pin(self, digest: str) -> None:
        """Keep the adapter in its slot once it is there."""
        self._pinned[digest] = None
        self._set_pinned(digest, pinned=True)

    def unpin(self, digest: str) -> None:
        """Leave the adapter to the LRU order again."""
        self._pinned.pop(digest, None)
        self._set_pinned(digest, pinned=False)

    def is_pinned(self, digest: str) -> bool:
        """Whether the adapter is or will be pinned."""
        return digest in self._pinned

    def _note_turn_start(self, resident: Resident, step: int) -> None:
        self.longest_turn_start = max(self.longest_turn_start, step - resident.given)

    def _set_pinned(self, digest: str, pinned: bool) -> None:
        resident = self._residents.get(digest)
        if resident is not None:
            resident.pinned = pinned
            self._sort(resident)

    def _sort(self, resident: Resident) -> None:
        """Put the adapter among the evictable ones, or take it out, after it changed."""
        if resident.slot in self._idle:
            self._idle.remove(resident.slot)
        if resident.is_idle:
            self._idle.add(resident.last_use, resident.slot, resident)

    def check(self) -> None:
        """Assert that every slot is free or taken exactly once."""
        taken = [resident.slot for resident in self._residents.values()]
        assert sorted(self._free + taken) == list(range(self.num_slots)), "slots do not add up"
        idle = sorted(resident.slot for resident in self._residents.values() if resident.is_idle)
        assert idle == sorted(r.slot for r in self._idle), "an adapter is out of its LRU place"
