"""Which adapter gets the next slot, and whose slot is drained for it.

Adapters with waiting sequences and no slot stand in one line, by when they joined it. The first
gets a free slot, or that of the least recently used adapter that nobody wants; if it takes more
memory than that leaves, those of several. When it has been passed over for `slot_patience` steps,
the adapter that the LRU order names is drained: it admits no more, and after `drain_steps` its
sequences are retracted. A slot cannot be drained before its own turn has lasted `slot_patience`
steps, nor under the foremost running sequence while the others are enough: so turns are long enough
to be of use, and something always runs to its end. `SchedulerConfig.slot_wait_bound` is what
follows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile

from cluster.request import BASE
from cluster.scheduling.config import SchedulerConfig
from cluster.scheduling.retraction import Retraction
from cluster.scheduling.running_set import RunningSet
from cluster.scheduling.slot_table import Resident, SlotTable
from cluster.scheduling.stats import AdapterLoad
from cluster.scheduling.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class Drain:
    """A slot that is being emptied for the first in line."""

    victim: str
    began: int  # step
    spared: int | None  # the foremost running sequence then: it is not retracted


class SlotTurns:
    """The line for slots; opens and shuts the lanes of the waiting queue."""

    def __init__(
        self,
        config: SchedulerConfig,
        slots: SlotTable,
        waiting: WaitingQueue,
        running: RunningSet,
        retraction: Retraction,
    ) -> None:
        self.longest_wait = 0  # steps
        self._config = config
        self._slots = slots
        self._waiting = waiting
        self._running = running
        self._retraction = retraction
        self._line: dict[str, int] = {}  # adapter: step at which it joined; the first in front
        self._sizes: dict[str, int] = {}  # bytes that each adapter claims that waits or has a slot
        self._drain: Drain | None = None
        self.evicted: list[tuple[int, str]] = []  # (slot, adapter) that the next load has cleared
        self._loads: list[AdapterLoad] = []

    def take_loads(self) -> list[AdapterLoad]:
        """Return the loads that can start: those whose slots the ranks have wholly let go.

        They start in order, because one may need the memory that the one before it clears.
        """
        ready = list(takewhile(self._is_quiet, self._loads))
        del self._loads[: len(ready)]
        return ready

    @property
    def upcoming(self) -> tuple[str, ...]:
        """Return the adapters at the front of the line, as many as there are slots."""
        return tuple(islice(self._line, self._slots.num_slots))

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
            len(self._line) + 1,
            num_unpinned,
            self._slots.longest_turn_start,
            is_crowded=self._slots.is_crowded,
        )

    @property
    def awaits_ends(self) -> bool:
        """Whether a load cannot start before the ranks are told who has left."""
        return any(not self._is_quiet(load) for load in self._loads)

    def expect(self, adapter: str, num_bytes: int) -> None:
        """Learn what an adapter claims before a sequence waits for it."""
        self._sizes[adapter] = num_bytes
        self._slots.largest = max(self._slots.largest, num_bytes)

    def note(self, adapter: str, step: int) -> None:
        """Put an adapter in line, or take it out, after its waiting sequences or slot changed."""
        resident = self._slots.get(adapter)
        is_loading = resident is not None and resident.loading
        if self._waiting.has(adapter) and not self._waiting.is_open(adapter) and not is_loading:
            self._line.setdefault(adapter, step)
        else:
            self._line.pop(adapter, None)
        if resident is None and not self._waiting.has(adapter):
            self._sizes.pop(adapter, None)

    def ready(self, adapter: str, step: int) -> None:
        """Let an adapter's sequences be admitted."""
        self._slots.loaded(adapter, step)
        self._waiting.open(adapter)

    def free(self, adapter: str, step: int) -> int:
        """Take an adapter's slot away and return it."""
        if self._drain is not None and self._drain.victim == adapter:
            self._drain = None
        self._waiting.shut(adapter)
        slot = self._slots.free(adapter, step)
        self.note(adapter, step)
        return slot

    def forget_evicted(self, places: list[tuple[int, str]]) -> None:
        """Leave it to the caller to have slots cleared that were evicted."""
        self.evicted = [place for place in self.evicted if place not in places]

    def pin(self, adapter: str, num_bytes: int, step: int) -> None:
        """Keep an adapter in its slot from now on."""
        self._slots.pin(adapter, num_bytes)
        if self._drain is not None and self._drain.victim == adapter:
            self._cancel(self._drain, step)

    def is_calm(self, step: int) -> bool:
        """Whether `advance` will take no slot from a running sequence, nor begin to."""
        return self._drain is None and not self._is_front_aged(step)

    def advance(self, step: int) -> None:
        """Age the line by one step: hand out slots, begin and end drains."""
        if self._drain is not None:
            self._settle(self._drain, step)
        self.hand_out(step)
        if self._drain is None and self._is_front_aged(step):
            self._begin_drain(step)
            self.hand_out(step)

    def hand_out(self, step: int) -> None:
        """Give slots that can be had to the front of the line."""
        while self._line:
            adapter, joined = next(iter(self._line.items()))
            if self._drain is not None and self._drain.victim == adapter:
                return  # it would wait for itself; the next step cancels the drain
            num_bytes = self._sizes[adapter]
            if not self._make_room(num_bytes, step):
                return
            del self._line[adapter]
            self.longest_wait = max(self.longest_wait, step - joined)
            slot = self._slots.reserve(adapter, num_bytes, step)
            self._loads.append(self._load_into(slot, adapter))

    def _make_room(self, num_bytes: int, step: int) -> bool:
        """Evict what must go for an adapter of this size; nothing if that is not enough.

        A drained adapter goes in any case: what it leaves is kept for the front of the line.
        """
        if self._slots.fits(num_bytes):
            return True
        if self._drain is not None:
            drained = self._slots.get(self._drain.victim)
            if drained is not None and drained.is_idle:
                self._evict(drained, step)
        victims: list[Resident] = []
        evictable = self._evictable(step)
        while not self._slots.fits(num_bytes, victims):
            victim = next(evictable, None)
            if victim is None:
                return False
            victims.append(victim)
        for victim in tuple(reversed(victims)):  # a larger one may have made others needless
            others = [one for one in victims if one is not victim]
            if self._slots.fits(num_bytes, others):
                victims = others
        for victim in victims:
            self._evict(victim, step)
        return True

    def _load_into(self, slot: int, adapter: str) -> AdapterLoad:
        """Return the load with all that must be cleared before it.

        Its own slot it clears itself, but later: only where memory is short it must be sooner.
        """
        places, self.evicted = self.evicted, []
        clears = tuple(one for one in places if one[0] != slot or self._slots.is_crowded)
        replaced = [one for place, one in places if place == slot]
        return AdapterLoad(adapter, slot, clears, replaced[-1] if replaced else None)

    def _evict(self, resident: Resident, step: int) -> None:
        self.evicted.append((self.free(resident.adapter, step), resident.adapter))

    def _evictable(self, step: int) -> Iterator[Resident]:
        """Yield the adapters whose slots can go now: those that are idle and wanted by nobody.

        An adapter that has not come to use its slot `slot_patience` steps after its load gives way
        to a higher priority at the front of the line: behind all of that, it might not for long.
        """
        front = self._waiting.priority(next(iter(self._line)))
        for resident in self._slots.idle():
            if not self._waiting.has(resident.adapter):
                yield resident
                continue
            is_unused = resident.served_since is None
            is_aged = resident.last_use + self._config.slot_patience <= step
            if is_unused and is_aged and front < self._waiting.priority(resident.adapter):
                yield resident

    def _is_front_aged(self, step: int) -> bool:
        joined = next(iter(self._line.values()), None)
        return joined is not None and joined + self._config.slot_patience <= step

    def _begin_drain(self, step: int) -> None:
        residents = [r for r in self._slots.residents() if not r.pinned]
        foremost = self._running.foremost()
        spared_adapter = foremost.adapter if foremost is not None else BASE
        others = [r for r in residents if r.adapter != spared_adapter]
        if self._slots.fits(self._sizes[next(iter(self._line))], others):
            residents = others
        patience = self._config.slot_patience
        candidates = [
            (r.last_use, r.slot, r.adapter)
            for r in residents
            if not r.loading and r.served_since is not None and r.served_since + patience <= step
        ]
        if not candidates:
            return
        victim = min(candidates)[2]
        self._drain = Drain(victim, step, None if foremost is None else foremost.seq_id)
        self._waiting.shut(victim)
        self.note(victim, step)

    def _settle(self, drain: Drain, step: int) -> None:
        self.note(drain.victim, step)  # one of its sequences may have been retracted for pages
        if not self._is_front_aged(step) or next(iter(self._line)) == drain.victim:
            self._cancel(drain, step)
        elif step >= drain.began + self._config.drain_steps:
            for running in reversed(self._running.of_adapter(drain.victim)):
                if running.seq_id != drain.spared:
                    self._retraction.retract(running, step)
            self.note(drain.victim, step)

    def _cancel(self, drain: Drain, step: int) -> None:
        self._drain = None
        self._waiting.open(drain.victim)
        self.note(drain.victim, step)

    def _is_quiet(self, load: AdapterLoad) -> bool:
        slots = (load.slot, *(slot for slot, _ in load.clears))
        return all(self._running.is_quiet(slot) for slot in slots)

    def check(self) -> None:
        """Assert that exactly the adapters that need a slot stand in line."""
        for resident in self._slots.residents():
            is_drained = self._drain is not None and self._drain.victim == resident.adapter
            may_admit = not (resident.loading or is_drained)
            assert self._waiting.is_open(resident.adapter) == may_admit, "a lane is wrongly open"
            assert resident.num_bytes == self._sizes[resident.adapter], "sizes differ"
        for adapter in self._line:
            assert self._waiting.has(adapter), f"{adapter} is in line for nobody"
            assert adapter in self._sizes, f"{adapter} is in line without a size"
