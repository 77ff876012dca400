"""Which adapter gets the next slot, and whose slot is drained for it.

Adapters with waiting sequences and no slot stand in one line, by when they joined it. The first
gets a free slot, or that of the least recently used adapter that nobody wants. When it has been
passed over for `slot_patience` steps, the adapter that the LRU order names is drained: it admits no
more, and after `drain_steps` its sequences are retracted. A slot cannot be drained before its own
turn has lasted `slot_patience` steps, nor under the foremost running sequence while there is
another: so turns are long enough to be of use, and something always runs to its end.
`SchedulerConfig.slot_wait_bound` is what follows.
"""

from dataclasses import dataclass

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
        self._drain: Drain | None = None
        self._loads: list[AdapterLoad] = []

    def take_loads(self) -> list[AdapterLoad]:
        """Return the loads that can start: those whose slot the ranks have wholly let go."""
        ready = [load for load in self._loads if self._running.is_quiet(load.slot)]
        self._loads = [load for load in self._loads if load not in ready]
        return ready

    @property
    def wait_bound(self) -> int:
        """Return the most steps that an adapter which joined the line now would wait for a slot."""
        num_unpinned = self._slots.num_slots - self._slots.num_pinned
        if num_unpinned < 1:
            return 0
        return self._config.slot_wait_bound(
            len(self._line) + 1, num_unpinned, self._slots.longest_turn_start
        )

    @property
    def awaits_ends(self) -> bool:
        """Whether a load cannot start before the ranks are told who has left."""
        return any(not self._running.is_quiet(load.slot) for load in self._loads)

    def note(self, adapter: str, step: int) -> None:
        """Put an adapter in line, or take it out, after its waiting sequences or slot changed."""
        resident = self._slots.get(adapter)
        is_loading = resident is not None and resident.loading
        if self._waiting.has(adapter) and not self._waiting.is_open(adapter) and not is_loading:
            self._line.setdefault(adapter, step)
        else:
            self._line.pop(adapter, None)

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

    def pin(self, adapter: str, step: int) -> None:
        """Keep an adapter in its slot from now on."""
        self._slots.pin(adapter)
        if self._drain is not None and self._drain.victim == adapter:
            self._cancel(self._drain, step)

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
            if not self._slots.has_free:
                victim = self._evictable(step)
                if victim is None:
                    return
                self.free(victim.digest, step)
            del self._line[adapter]
            self.longest_wait = max(self.longest_wait, step - joined)
            self._loads.append(AdapterLoad(adapter, self._slots.reserve(adapter, step)))

    def _evictable(self, step: int) -> Resident | None:
        """Return the adapter whose slot can go now: drained, or idle and wanted by nobody.

        An adapter that has not come to use its slot `slot_patience` steps after its load gives way
        to a higher priority at the front of the line: behind all of that, it might not for long.
        """
        if self._drain is not None:
            drained = self._slots.get(self._drain.victim)
            if drained is not None and drained.is_idle:
                return drained
        front = self._waiting.priority(next(iter(self._line)))
        for resident in self._slots.idle():
            if not self._waiting.has(resident.digest):
                return resident
            is_unused = resident.served_since is None
            is_aged = resident.last_use + self._config.slot_patience <= step
            if is_unused and is_aged and front < self._waiting.priority(resident.digest):
                return resident
        return None

    def _is_front_aged(self, step: int) -> bool:
        joined = next(iter(self._line.values()), None)
        return joined is not None and joined + self._config.slot_patience <= step

    def _begin_drain(self, step: int) -> None:
        residents = self._slots.residents()
        foremost = self._running.foremost()
        spared_adapter = foremost.adapter if foremost is not None else BASE
        num_unpinned = self._slots.num_slots - sum(r.pinned for r in residents)
        patience = self._config.slot_patience
        candidates = [
            (r.last_use, r.slot, r.digest)
            for r in residents
            if not (r.loading or r.pinned)
            and r.served_since is not None
            and r.served_since + patience <= step
            and (r.digest != spared_adapter or num_unpinned == 1)
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

    def check(self) -> None:
        """Assert that exactly the adapters that need a slot stand in line."""
        for resident in self._slots.residents():
            is_drained = self._drain is not None and self._drain.victim == resident.digest
            may_admit = not (resident.loading or is_drained)
            assert self._waiting.is_open(resident.digest) == may_admit, "a lane is wrongly open"
        for adapter in self._line:
            assert self._waiting.has(adapter), f"{adapter} is in line for nobody"
