"""The queue for LoRA slots: which adapter gets the next one, and how long it waits at most.

It holds the adapters that have waiting sequences and no slot; it knows what each claims.
"""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.lora_slots import SlotTable
from cluster.scheduler.request_queue import RequestQueue
from cluster.scheduler.stats import SchedulerCounters
from cluster.scheduler.tenants import Tenants


@dataclass(slots=True)
class QueueEntry:
    """An adapter that queues for a slot."""

    joined: int  # step
    place: int  # that it joined at, 1 for the first
    bound: int  # steps that it was to wait at most, by what was known then
    num_overtaken: int = 0  # adapters that joined later and before it


class SlotQueue:
    """Adapters that queue; the request queue's lanes and the slots say which ones must.

    Tenants take turns: the second adapter of one is behind the first of each other, by weight, and
    so on. The first of all stays the first, and an adapter is overtaken by fewer others than its
    place was when it joined.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        slots: SlotTable,
        waiting: RequestQueue,
        tenants: Tenants,
        counters: SchedulerCounters,
    ) -> None:
        self.longest_wait = 0  # steps
        self._config = config
        self._slots = slots
        self._waiting = waiting
        self._tenants = tenants
        self._counters = counters
        self.entries: dict[str, QueueEntry] = {}  # by adapter; the first in front
        self._sizes: dict[str, int] = {}  # bytes that each adapter claims that waits or has a slot

    @property
    def first(self) -> str | None:
        """Return the adapter that gets the next slot."""
        return next(iter(self.entries), None)

    @property
    def upcoming(self) -> tuple[str, ...]:
        """Return the adapters at the front, as many as there are slots."""
        return tuple(islice(self.entries, self._slots.num_slots))

    def is_first_aged(self, step: int) -> bool:
        """Whether the first has been passed over for so long that a slot is drained for it."""
        entry = next(iter(self.entries.values()), None)
        return entry is not None and entry.joined + self._config.slot_patience <= step

    def size(self, adapter: str) -> int:
        """Return the bytes that an adapter claims which waits or has a slot."""
        return self._sizes[adapter]

    def largest_besides(self, pinned: str) -> int:
        """Return the most bytes that an adapter claims which waits or has a slot, not pinned."""
        sizes = (
            num_bytes
            for adapter, num_bytes in self._sizes.items()
            if adapter != pinned and not self._slots.is_pinned(adapter)
        )
        return max(sizes, default=0)

    @property
    def wait_bound(self) -> int:
        """Return the most steps that an adapter that queues now would wait for a slot."""
        return self._bound(len(self.entries) + 1)

    def _bound(self, place: int) -> int:
        num_unpinned = self._slots.num_slots - self._slots.num_pinned
        if num_unpinned < 1:
            return 0
        return self._config.slot_wait_bound(
            place,
            num_unpinned,
            self._slots.longest_turn_start,
            is_crowded=self._slots.is_crowded,
        )

    def expect(self, adapter: str, num_bytes: int) -> None:
        """Note what an adapter claims before a sequence waits for it."""
        self._sizes[adapter] = num_bytes
        self._slots.largest = max(self._slots.largest, num_bytes)

    def update(self, adapter: str, step: int) -> None:
        """Queue an adapter, or take it out, after its waiting sequences or its slot changed."""
        resident = self._slots.get(adapter)
        is_loading = resident is not None and resident.loading
        if self._waiting.has(adapter) and not self._waiting.is_open(adapter) and not is_loading:
            if adapter not in self.entries:
                self._join(adapter, step)
        else:
            self.entries.pop(adapter, None)
        if resident is None and not self._waiting.has(adapter):
            self._sizes.pop(adapter, None)

    def _join(self, adapter: str, step: int) -> None:
        """Put an adapter where the turn of its tenant is."""
        entries, at = self.entries, len(self.entries)
        if len(self._tenants) > 1:
            at = self._place_of(adapter)
        later = dict(islice(entries.items(), at, None))
        for other, entry in later.items():
            entry.num_overtaken += 1
            del entries[other]
        entries[adapter] = QueueEntry(step, at + 1, self._bound(at + 1))
        entries.update(later)

    def _place_of(self, adapter: str) -> int:
        """Return how many of those that queue stay before an adapter that joins."""
        order = list(self.entries.items())
        before = Counter(one for other, _ in order for one in self._waiting.tenants(other))
        turn, at = self._turn(adapter, before), len(order)
        while at > 1:
            other, entry = order[at - 1]
            before.subtract(self._waiting.tenants(other))
            if entry.num_overtaken + 1 >= entry.place or self._turn(other, before) <= turn:
                break
            at -= 1
        return at

    def _turn(self, adapter: str, before: Counter[str]) -> Fraction:
        """Return the turn of an adapter, by how many of its tenants' are before it."""
        tenants = sorted(self._waiting.tenants(adapter))
        return min(Fraction(before[one], self._tenants.weight(one)) for one in tenants)

    def leave(self, adapter: str, step: int) -> None:
        """Take an adapter out that is given its slot now.

        It is late if what the bound rests on has grown since it joined: loads were slower than any
        before, slots were pinned, or adapters came that are larger than all that were known.
        """
        entry = self.entries.pop(adapter)
        waited = step - entry.joined
        self.longest_wait = max(self.longest_wait, waited)
        self._counters.late_slots += waited > entry.bound

    def check(self) -> None:
        """Assert that only adapters queue that somebody waits for."""
        for resident in self._slots.residents():
            assert resident.num_bytes == self._sizes[resident.adapter], "sizes differ"
        for adapter in self.entries:
            assert self._waiting.has(adapter), f"{adapter} queues for nobody"
            assert adapter in self._sizes, f"{adapter} queues without a size"
