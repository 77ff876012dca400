"""LoRA slots: which adapter is in which slot of the ranks' banks.

An adapter that is loading, leased or pinned keeps its slot; the others may be evicted, in LRU
order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from cluster.lru import Lru
from cluster.scheduler.stats import SchedulerCounters


@dataclass(slots=True)
class Resident:
    """An adapter in a slot."""

    adapter: str
    slot: int
    num_bytes: int  # that it claims on each rank
    given: int  # step at which it got the slot
    last_use: int  # step of the last lease taken or given back, or of the end of the load
    loading: bool = True
    pinned: bool = False
    leases: int = 0  # running sequences that hold the adapter
    served_since: int | None = None  # step of the first lease after the load
    tenant: str | None = None  # whose sequence took the last lease

    @property
    def is_idle(self) -> bool:
        """Whether nothing but the LRU order decides how long it stays."""
        return not (self.loading or self.pinned or self.leases)


class SlotTable:
    """Slots [0, num_slots): free, or with one adapter each.

    `memory` is what all residents together may claim on each rank, in bytes; 0: no limit. Of pins
    it is the owner in a scheduler.
    """

    def __init__(
        self, num_slots: int, memory: int = 0, counters: SchedulerCounters | None = None
    ) -> None:
        self.num_slots = num_slots
        self.memory = memory
        self._counters = counters or SchedulerCounters()
        self.largest = 0  # bytes that any adapter which came here claims
        self.longest_turn_start = 0  # steps from a slot's hand-over to its first lease or loss
        self._free = list(range(num_slots))  # a heap: smallest slot first
        self._residents: dict[str, Resident] = {}
        self._pinned: dict[str, int] = {}  # bytes that each claims; resident or not
        self._idle: Lru[Resident] = Lru()

    @property
    def is_crowded(self) -> bool:
        """Whether memory may hold fewer adapters than there are slots."""
        return 0 < self.memory < self.largest * self.num_slots

    @property
    def num_pinned(self) -> int:
        """Adapters that are or will be pinned in a slot."""
        return len(self._pinned)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that they claim."""
        return sum(self._pinned.values())

    def fits(self, num_bytes: int, without: Sequence[Resident] = ()) -> bool:
        """Tell whether an adapter could get a slot if some residents had left theirs."""
        if not self._free and not without:
            return False
        return not self.memory or num_bytes <= self.memory - self._claimed(without)

    def fits_pinned(self, adapter: str, num_bytes: int) -> bool:
        """Tell whether an adapter fits beside the pinned ones, if it is not one of them."""
        others = sum(claimed for name, claimed in self._pinned.items() if name != adapter)
        return not self.memory or others + num_bytes <= self.memory

    def get(self, adapter: str) -> Resident | None:
        """Return the adapter's residence, if it has one."""
        return self._residents.get(adapter)

    def is_ready(self, adapter: str) -> bool:
        """Whether a plan may use the adapter."""
        resident = self._residents.get(adapter)
        return resident is not None and not resident.loading

    def residents(self) -> list[Resident]:
        """Return all adapters in slots, by slot."""
        return sorted(self._residents.values(), key=lambda resident: resident.slot)

    def idle(self) -> Iterator[Resident]:
        """Yield the adapters that may be evicted, the one that goes first at the front."""
        return iter(self._idle)

    def reserve(self, adapter: str, num_bytes: int, step: int) -> int:
        """Begin to load an adapter into the smallest free slot and return the slot."""
        assert adapter not in self._residents, f"adapter {adapter} is resident already"
        assert self.fits(num_bytes), f"{num_bytes} bytes are more than is left"
        slot = heappop(self._free)
        self._residents[adapter] = Resident(
            adapter, slot, num_bytes, step, step, pinned=adapter in self._pinned
        )
        self._counters.adapter_loads += 1
        return slot

    def loaded(self, adapter: str, step: int) -> None:
        """Let plans use an adapter whose load is complete on every rank."""
        resident = self._residents[adapter]
        assert resident.loading, f"adapter {adapter} was not loading"
        resident.loading = False
        resident.last_use = step
        self._sort(resident)

    def lease(self, adapter: str, step: int, tenant: str = "") -> int:
        """Hold a ready adapter for one more sequence, of a tenant, and return its slot."""
        resident = self._residents[adapter]
        assert not resident.loading, f"adapter {adapter} is not ready"
        resident.leases += 1
        resident.tenant = tenant
        resident.last_use = step
        if resident.served_since is None:
            resident.served_since = step
            self._note_turn_start(resident, step)
        self._sort(resident)
        return resident.slot

    def release(self, adapter: str, step: int) -> None:
        """Give back one lease."""
        resident = self._residents[adapter]
        assert resident.leases > 0, f"adapter {adapter} is released more often than leased"
        resident.leases -= 1
        resident.last_use = step
        self._sort(resident)

    def free(self, adapter: str, step: int) -> int:
        """Take an adapter that nobody holds out of its slot and return the slot."""
        resident = self._residents[adapter]
        if resident.served_since is None:
            self._note_turn_start(resident, step)
        assert resident.leases == 0, f"adapter {adapter} is freed under its sequences"
        del self._residents[adapter]
        if resident.slot in self._idle:
            self._idle.remove(resident.slot)
        heappush(self._free, resident.slot)
        return resident.slot

    def pin(self, adapter: str, num_bytes: int) -> None:
        """Keep the adapter in its slot once it is there."""
        self._pinned[adapter] = num_bytes
        self._set_pinned(adapter, pinned=True)

    def unpin(self, adapter: str) -> None:
        """Leave the adapter to the LRU order again."""
        self._pinned.pop(adapter, None)
        self._set_pinned(adapter, pinned=False)

    def is_pinned(self, adapter: str) -> bool:
        """Whether the adapter is or will be pinned."""
        return adapter in self._pinned

    def _claimed(self, without: Sequence[Resident] = ()) -> int:
        all_bytes = sum(resident.num_bytes for resident in self._residents.values())
        return all_bytes - sum(resident.num_bytes for resident in without)

    def _note_turn_start(self, resident: Resident, step: int) -> None:
        self.longest_turn_start = max(self.longest_turn_start, step - resident.given)

    def _set_pinned(self, adapter: str, pinned: bool) -> None:
        resident = self._residents.get(adapter)
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
        assert not self.memory or self._claimed() <= self.memory, "more is claimed than there is"
