"""Which adapter gets the next slot, and whose slot is drained for it.

The first in line (`slot_line`) gets a free slot, or that of the least recently used adapter that
nobody wants; if it takes more memory than that leaves, those of several. When it has been passed
over for `slot_patience` steps, the adapter that the LRU order names is drained: it admits no more,
and after `drain_steps` its sequences are preempted. A slot cannot be drained before its own turn
has lasted `slot_patience` steps, nor under the foremost running sequence while the others are
enough: so turns are long enough to be of use, and something always runs to its end.
`SchedulerConfig.slot_wait_bound` is what follows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.request import BASE
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.lora_slot_loads import SlotLoads
from cluster.scheduler.lora_slot_queue import SlotQueue
from cluster.scheduler.lora_slots import Resident, SlotTable
from cluster.scheduler.preemption import Preemption
from cluster.scheduler.request_queue import RequestQueue
from cluster.scheduler.running import RunningSet


@dataclass(frozen=True, slots=True)
class Drain:
    """A slot that is being emptied for the first in line."""

    victim: str
    began: int  # step
    spared: int | None  # the foremost running sequence then: it is not preempted


class SlotPolicy:
    """Hands slots out; opens and shuts the lanes of the waiting queue."""

    def __init__(
        self,
        config: SchedulerConfig,
        slots: SlotTable,
        line: SlotQueue,
        loads: SlotLoads,
        waiting: RequestQueue,
        running: RunningSet,
        preemption: Preemption,
    ) -> None:
        self._config = config
        self._slots = slots
        self._line = line
        self._loads = loads
        self._waiting = waiting
        self._running = running
        self._preemption = preemption
        self._drain: Drain | None = None

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
        self._line.note(adapter, step)
        return slot

    def pin(self, adapter: str, num_bytes: int, step: int) -> None:
        """Keep an adapter in its slot from now on."""
        self._slots.pin(adapter, num_bytes)
        if self._drain is not None and self._drain.victim == adapter:
            self._cancel(self._drain, step)

    def is_calm(self, step: int) -> bool:
        """Whether `advance` will take no slot from a running sequence, nor begin to."""
        return self._drain is None and not self._line.is_first_aged(step)

    def advance(self, step: int) -> None:
        """Age the line by one step: hand out slots, begin and end drains."""
        if self._drain is not None:
            self._settle(self._drain, step)
        self.hand_out(step)
        first = self._line.first
        if self._drain is None and first is not None and self._line.is_first_aged(step):
            self._begin_drain(first, step)
            self.hand_out(step)

    def hand_out(self, step: int) -> None:
        """Give slots that can be had to the front of the line."""
        while (adapter := self._line.first) is not None:
            if self._drain is not None and self._drain.victim == adapter:
                return  # it would wait for itself; the next step cancels the drain
            num_bytes = self._line.size(adapter)
            if not self._make_room(adapter, num_bytes, step):
                return
            self._line.leave(adapter, step)
            self._loads.add(self._slots.reserve(adapter, num_bytes, step), adapter)

    def _make_room(self, adapter: str, num_bytes: int, step: int) -> bool:
        """Evict what must go for the first in line; nothing if that is not enough.

        A drained adapter goes in any case: what it leaves is kept for the front of the line.
        """
        if self._slots.fits(num_bytes):
            return True
        if self._drain is not None:
            drained = self._slots.get(self._drain.victim)
            if drained is not None and drained.is_idle:
                self._evict(drained, step)
        victims: list[Resident] = []
        evictable = self._evictable(adapter, step)
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

    def _evict(self, resident: Resident, step: int) -> None:
        self._loads.evicted.append((self.free(resident.adapter, step), resident.adapter))

    def _evictable(self, first: str, step: int) -> Iterator[Resident]:
        """Yield the adapters whose slots can go now: those that are idle and wanted by nobody.

        An adapter that has not come to use its slot `slot_patience` steps after its load gives way
        to a higher priority that is `first` in line: behind all of that, it might not for long.
        """
        priority = self._waiting.priority(first)
        for resident in self._slots.idle():
            if not self._waiting.has(resident.adapter):
                yield resident
                continue
            is_unused = resident.served_since is None
            is_aged = resident.last_use + self._config.slot_patience <= step
            if is_unused and is_aged and priority < self._waiting.priority(resident.adapter):
                yield resident

    def _begin_drain(self, first: str, step: int) -> None:
        residents = [r for r in self._slots.residents() if not r.pinned]
        foremost = self._running.foremost()
        spared_adapter = foremost.adapter if foremost is not None else BASE
        others = [r for r in residents if r.adapter != spared_adapter]
        if self._slots.fits(self._line.size(first), others):
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
        self._line.note(victim, step)

    def _settle(self, drain: Drain, step: int) -> None:
        # One of its sequences may have been preempted for pages.
        self._line.note(drain.victim, step)
        if not self._line.is_first_aged(step) or self._line.first == drain.victim:
            self._cancel(drain, step)
        elif step >= drain.began + self._config.drain_steps:
            for running in reversed(self._running.of_adapter(drain.victim)):
                if running.seq_id != drain.spared:
                    self._preemption.preempt(running, step)
            self._line.note(drain.victim, step)

    def _cancel(self, drain: Drain, step: int) -> None:
        self._drain = None
        self._waiting.open(drain.victim)
        self._line.note(drain.victim, step)

    def check(self) -> None:
        """Assert that exactly the lanes are open whose adapters may be used."""
        for resident in self._slots.residents():
            is_drained = self._drain is not None and self._drain.victim == resident.adapter
            may_admit = not (resident.loading or is_drained)
            assert self._waiting.is_open(resident.adapter) == may_admit, "a lane is wrongly open"
