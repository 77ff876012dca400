"""Loads that have been decided and not begun, and what must be cleared on the ranks for each.

Owns the slots whose adapters were evicted while the ranks may still hold them: the next load clears
them. Knows nothing of who gets a slot, nor of how bytes reach a rank.
"""

from itertools import takewhile

from cluster.scheduler.lora_slots import SlotTable
from cluster.scheduler.running import RunningSet
from cluster.scheduler.stats import AdapterLoad


class SlotLoads:
    """A queue; a load leaves it when no sequence of the ranks uses its slots any more."""

    def __init__(self, slots: SlotTable, running: RunningSet) -> None:
        self.evicted: list[tuple[int, str]] = []  # (slot, adapter) that the next load has cleared
        self._slots = slots
        self._running = running
        self._loads: list[AdapterLoad] = []

    @property
    def await_ends(self) -> bool:
        """Whether a load cannot start before the ranks are told who has left."""
        return any(not self._is_quiet(load) for load in self._loads)

    def take(self) -> list[AdapterLoad]:
        """Return the loads that can start: those whose slots the ranks have wholly let go.

        They start in order, because one may need the memory that the one before it clears.
        """
        ready = list(takewhile(self._is_quiet, self._loads))
        del self._loads[: len(ready)]
        return ready

    def add(self, slot: int, adapter: str) -> None:
        """Have an adapter loaded into a slot, after all that must be cleared before it.

        Its own slot it clears itself, but later: only where memory is short it must be sooner.
        """
        places, self.evicted = self.evicted, []
        clears = tuple(one for one in places if one[0] != slot or self._slots.is_crowded)
        replaced = [one for place, one in places if place == slot]
        load = AdapterLoad(adapter, slot, clears, replaced[-1] if replaced else None)
        self._loads.append(load)

    def forget_evicted(self, places: list[tuple[int, str]]) -> None:
        """Leave it to the caller to have slots cleared that were evicted."""
        self.evicted = [place for place in self.evicted if place not in places]

    def _is_quiet(self, load: AdapterLoad) -> bool:
        slots = (load.slot, *(slot for slot, _ in load.clears))
        return all(self._running.is_quiet(slot) for slot in slots)
