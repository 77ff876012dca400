"""The one line for slots: adapters with waiting sequences and no slot, by when they joined it.

Owns who stands in it and for how long, what each adapter claims, and what the bound on the wait
comes to. Knows nothing of whose slot is taken for the first.
"""

from dataclasses import dataclass
from itertools import islice

from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.lora_slots import SlotTable
from cluster.scheduler.request_queue import RequestQueue


@dataclass(frozen=True, slots=True)
class Place:
    """An adapter's stand in the line."""

    joined: int  # step
    bound: int  # steps that it was to wait at most, by what was known then


class SlotQueue:
    """The line; the lanes of the waiting queue and the slots say who must stand in it."""

    def __init__(self, config: SchedulerConfig, slots: SlotTable, waiting: RequestQueue) -> None:
        self.longest_wait = 0  # steps
        self.num_late = 0  # slots handed over later than their adapter's bound said
        self._config = config
        self._slots = slots
        self._waiting = waiting
        self._places: dict[str, Place] = {}  # by adapter; the first in front
        self._sizes: dict[str, int] = {}  # bytes that each adapter claims that waits or has a slot

    @property
    def first(self) -> str | None:
        """Return the adapter that gets the next slot."""
        return next(iter(self._places), None)

    @property
    def upcoming(self) -> tuple[str, ...]:
        """Return the adapters at the front of the line, as many as there are slots."""
        return tuple(islice(self._places, self._slots.num_slots))

    def is_first_aged(self, step: int) -> bool:
        """Whether the first has been passed over for so long that a slot is drained for it."""
        place = next(iter(self._places.values()), None)
        return place is not None and place.joined + self._config.slot_patience <= step

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
        """Return the most steps that an adapter which joined the line now would wait for a slot."""
        num_unpinned = self._slots.num_slots - self._slots.num_pinned
        if num_unpinned < 1:
            return 0
        return self._config.slot_wait_bound(
            len(self._places) + 1,
            num_unpinned,
            self._slots.longest_turn_start,
            is_crowded=self._slots.is_crowded,
        )

    def expect(self, adapter: str, num_bytes: int) -> None:
        """Learn what an adapter claims before a sequence waits for it."""
        self._sizes[adapter] = num_bytes
        self._slots.largest = max(self._slots.largest, num_bytes)

    def note(self, adapter: str, step: int) -> None:
        """Put an adapter in line, or take it out, after its waiting sequences or slot changed."""
        resident = self._slots.get(adapter)
        is_loading = resident is not None and resident.loading
        if self._waiting.has(adapter) and not self._waiting.is_open(adapter) and not is_loading:
            if adapter not in self._places:
                self._places[adapter] = Place(step, self.wait_bound)
        else:
            self._places.pop(adapter, None)
        if resident is None and not self._waiting.has(adapter):
            self._sizes.pop(adapter, None)

    def leave(self, adapter: str, step: int) -> None:
        """Take an adapter out of the line that is given its slot now.

        It is late if what the bound rests on has grown since it joined: loads were slower than any
        before, slots were pinned, or adapters came that are larger than all that were known.
        """
        place = self._places.pop(adapter)
        waited = step - place.joined
        self.longest_wait = max(self.longest_wait, waited)
        self.num_late += waited > place.bound

    def check(self) -> None:
        """Assert that only adapters stand in line that somebody waits for."""
        for resident in self._slots.residents():
            assert resident.num_bytes == self._sizes[resident.adapter], "sizes differ"
        for adapter in self._places:
            assert self._waiting.has(adapter), f"{adapter} is in line for nobody"
            assert adapter in self._sizes, f"{adapter} is in line without a size"
