"""Holds every wait for a LoRA slot against the bound that was promised for it."""

from cluster.scheduler.scheduler import Scheduler


class SlotWaits:
    """Every wait for a slot, held against the bound for the place that its adapter had.

    What the bound rests on may change meanwhile: pins come and go, adapters turn out larger than
    all that were known, and how long a turn takes to start is known only once it has started:
    what has a slot, and waits for batch room, is not begun.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.num_waits = 0
        self._scheduler = scheduler
        self._queue = scheduler._slot_queue
        self._joined: dict[str, tuple[int, set[int]]] = {}  # place, and unpinned slots since then
        self._update, self._leave = self._queue.update, self._queue.leave
        self._pin = scheduler._slots.pin
        self._queue.update = self.update  # type: ignore[method-assign]
        self._queue.leave = self.leave  # type: ignore[method-assign]
        scheduler._slots.pin = self.pin  # type: ignore[method-assign]

    @property
    def _num_unpinned(self) -> int:
        slots = self._scheduler._slots
        return slots.num_slots - slots.num_pinned

    def update(self, adapter: str, step: int) -> None:
        self._update(adapter, step)
        for gone in self._joined.keys() - self._queue.entries.keys():
            del self._joined[gone]
        if adapter in self._queue.entries and adapter not in self._joined:
            place = self._queue.entries[adapter].place
            self._joined[adapter] = place, {self._num_unpinned}

    def pin(self, adapter: str, num_bytes: int) -> None:
        self._pin(adapter, num_bytes)
        for _, unpinned in self._joined.values():
            unpinned.add(self._num_unpinned)

    def leave(self, adapter: str, step: int) -> None:
        waited = step - self._queue.entries[adapter].joined
        self._leave(adapter, step)
        place, unpinned = self._joined.pop(adapter)
        slots = self._scheduler._slots
        not_begun = [step - one.given for one in slots.residents() if one.served_since is None]
        start = max(slots.longest_turn_start, *not_begun, 0)
        bound = max(
            self._scheduler.config.slot_wait_bound(place, count, start, is_crowded=slots.is_crowded)
            for count in unpinned
        )
        self.num_waits += 1
        assert waited <= bound, f"{adapter} waited {waited} steps in place {place} of {bound}"
