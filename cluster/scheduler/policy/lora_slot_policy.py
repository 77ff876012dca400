"""LoRA slot policy: which adapter gets the next slot, whose slot is drained for it, what is pinned.

The first in the slot queue gets a free slot, or that of the least recently used adapter that nobody
wants, but for those of tenants within their share; if it takes more memory than that leaves, those
of several. When it has been passed over for
`slot_patience` steps, the adapter that the LRU order names is drained: it admits no more, and after
`drain_steps` its sequences are preempted. A slot cannot be drained before its own turn has lasted
`slot_patience` steps, nor under the foremost running sequence while the others are enough: so turns
are long enough to be of use, and something always runs to its end.
`SchedulerConfig.slot_wait_bound` is what follows.

Also owns the loads that have been decided and not begun, and the slots whose adapters were evicted
while the ranks may still hold them: the next load clears them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from cluster.errors import Conflict
from cluster.request import BASE
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.lora_slots import Resident, SlotTable
from cluster.scheduler.policy.lora_slot_queue import SlotQueue
from cluster.scheduler.policy.share_policy import SlotShares
from cluster.scheduler.request_queue import RequestQueue
from cluster.scheduler.running import RunningSet
from cluster.scheduler.stats import AdapterLoad


@dataclass(frozen=True, slots=True)
class Drain:
    """A slot that is being emptied for the first in the queue."""

    victim: str
    began: int  # step
    spared: int | None  # the foremost running sequence then: it is not preempted


class SlotPolicy:
    """Assigns slots; opens and shuts the lanes of the request queue."""

    def __init__(
        self,
        config: SchedulerConfig,
        slots: SlotTable,
        queue: SlotQueue,
        waiting: RequestQueue,
        running: RunningSet,
        shares: SlotShares,
    ) -> None:
        self.evicted: list[tuple[int, str]] = []  # (slot, adapter) that the next load has cleared
        self._config = config
        self._slots = slots
        self._queue = queue
        self._waiting = waiting
        self._running = running
        self._shares = shares
        self._drain: Drain | None = None
        self._loads: list[AdapterLoad] = []

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
        self._queue.update(adapter, step)
        return slot

    def pin(self, adapter: str, num_bytes: int, step: int) -> None:
        """Keep an adapter in its slot, now or once it is there.

        Raises:
            Conflict: if no slot would be left for all the others, or too little memory.
        """
        slots = self._slots
        if slots.is_pinned(adapter):
            return
        if slots.num_pinned + 1 >= slots.num_slots:
            raise Conflict(
                f"{slots.num_pinned} of {slots.num_slots} adapter slots are pinned; "
                "one must stay free for the other adapters"
            )
        others = self._queue.largest_besides(adapter)
        if slots.memory and slots.pinned_bytes + num_bytes + others > slots.memory:
            raise Conflict(
                f"{slots.pinned_bytes} of {slots.memory} bytes for adapters are pinned; "
                f"{num_bytes} more would leave too little for the other adapters"
            )
        slots.pin(adapter, num_bytes)
        if self._drain is not None and self._drain.victim == adapter:
            self._cancel(self._drain, step)

    def unpin(self, adapter: str) -> None:
        """Let an adapter be evicted again when it is idle."""
        self._slots.unpin(adapter)

    @property
    def loads_await_ends(self) -> bool:
        """Whether a load cannot start before the ranks are told who has left."""
        return any(not self._can_start(load) for load in self._loads)

    def take_loads(self) -> list[AdapterLoad]:
        """Return the loads that can start: those whose slots the ranks have wholly let go.

        They start in order, because one may need the memory that the one before it clears.
        """
        if not self._loads:
            return []
        ready = list(takewhile(self._can_start, self._loads))
        del self._loads[: len(ready)]
        return ready

    def forget_evicted(self, places: list[tuple[int, str]]) -> None:
        """Leave it to the caller to have slots cleared that were evicted."""
        self.evicted = [place for place in self.evicted if place not in places]

    def may_plan_ahead(self, step: int) -> bool:
        """Whether `advance` will take no slot from a running sequence, nor begin to."""
        return self._drain is None and not self._queue.is_first_aged(step)

    def advance(self, step: int) -> None:
        """Age the queue by one step: assign slots, begin and end drains."""
        if self._drain is None and not self._queue.entries:
            return
        if self._drain is not None:
            self._go_on_draining(self._drain, step)
        self.assign(step)
        first = self._queue.first
        if self._drain is None and first is not None and self._queue.is_first_aged(step):
            self._begin_drain(first, step)
            self.assign(step)

    def assign(self, step: int) -> None:
        """Give slots that can be had to the front of the queue."""
        while (adapter := self._queue.first) is not None:
            if self._drain is not None and self._drain.victim == adapter:
                return  # it would wait for itself; the next step cancels the drain
            num_bytes = self._queue.size(adapter)
            if not self._make_room(adapter, num_bytes, step):
                return
            self._queue.leave(adapter, step)
            self._load(self._slots.reserve(adapter, num_bytes, step), adapter)

    def _load(self, slot: int, adapter: str) -> None:
        """Have an adapter loaded into a slot, after all that must be cleared before it.

        Its own slot it clears itself, but later: only where memory is short it must be sooner.
        """
        places, self.evicted = self.evicted, []
        clears = tuple(one for one in places if one[0] != slot or self._slots.is_crowded)
        replaced = [one for place, one in places if place == slot]
        load = AdapterLoad(adapter, slot, clears, replaced[-1] if replaced else None)
        self._loads.append(load)

    def _can_start(self, load: AdapterLoad) -> bool:
        slots = (load.slot, *(slot for slot, _ in load.clears))
        return not any(self._running.uses_slot(slot) for slot in slots)

    def _make_room(self, adapter: str, num_bytes: int, step: int) -> bool:
        """Evict what must go for the first in the queue; nothing if that is not enough.

        A drained adapter goes in any case: what it leaves is kept for the front of the queue.
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
        self.evicted.append((self.free(resident.adapter, step), resident.adapter))

    def _evictable(self, first: str, step: int) -> Iterator[Resident]:
        """Yield the adapters whose slots can go now: those that are idle and wanted by nobody.

        An adapter that has not come to use its slot `slot_patience` steps after its load gives way
        to a higher priority that is `first` in line: behind all of that, it might not for long.
        """
        priority, spared = self._waiting.priority(first), self._shares.spared(first)
        idle = sorted(self._slots.idle(), key=lambda resident: resident.slot in spared)
        for resident in idle:
            if resident.slot in spared and self._goes_on:
                return
            if not self._waiting.has(resident.adapter):
                yield resident
                continue
            is_unused = resident.served_since is None
            is_aged = resident.last_use + self._config.slot_patience <= step
            if is_unused and is_aged and priority < self._waiting.priority(resident.adapter):
                yield resident

    @property
    def _goes_on(self) -> bool:
        """Whether there will be steps without another slot: none else would end a wait for one."""
        return (
            len(self._running) > 0
            or self._waiting.first() is not None
            or any(resident.loading for resident in self._slots.residents())
        )

    def _begin_drain(self, first: str, step: int) -> None:
        residents = [r for r in self._slots.residents() if not r.pinned]
        foremost = self._running.foremost()
        spared_adapter = foremost.adapter if foremost is not None else BASE
        others = [r for r in residents if r.adapter != spared_adapter]
        if self._slots.fits(self._queue.size(first), others):
            residents = others
        spared = self._shares.spared(first)
        others = [r for r in residents if r.slot not in spared]
        if self._slots.fits(self._queue.size(first), others):
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
        self._queue.update(victim, step)

    def _go_on_draining(self, drain: Drain, step: int) -> None:
        # One of its sequences may have been preempted for pages.
        self._queue.update(drain.victim, step)
        if not self._queue.is_first_aged(step) or self._queue.first == drain.victim:
            self._cancel(drain, step)
        elif step >= drain.began + self._config.drain_steps:
            for running in reversed(self._running.of_adapter(drain.victim)):
                if running.seq_id != drain.spared:
                    self._running.preempt(running, step)
            self._queue.update(drain.victim, step)

    def _cancel(self, drain: Drain, step: int) -> None:
        self._drain = None
        self._waiting.open(drain.victim)
        self._queue.update(drain.victim, step)

    def check(self) -> None:
        """Assert that exactly the lanes are open whose adapters may be used."""
        for resident in self._slots.residents():
            is_drained = self._drain is not None and self._drain.victim == resident.adapter
            may_admit = not (resident.loading or is_drained)
            assert self._waiting.is_open(resident.adapter) == may_admit, "a lane is wrongly open"
