"""How long things take in one engine, and how often they happen, for operators.

Times of sequences, steps and adapter loads, and why groups of ranks were lost. Nothing decides by
it. Counts outlive the ranks.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cluster.engine.executor import FailureCause
from cluster.histogram import (
    COUNT_BUCKETS,
    E2E_BUCKETS,
    LOAD_BUCKETS,
    STEP_BUCKETS,
    TTFT_BUCKETS,
    Histogram,
    HistogramCounts,
)
from cluster.messages import EngineCounters
from worker.protocol import Plan, StepOutput

BUCKETS: dict[str, tuple[float, ...]] = {
    "queue_time_seconds": TTFT_BUCKETS,
    "prefill_time_seconds": TTFT_BUCKETS,
    "decode_time_seconds": E2E_BUCKETS,
    "stream_pause_seconds": E2E_BUCKETS,
    "step_seconds/plan": STEP_BUCKETS,
    "step_seconds/ranks": STEP_BUCKETS,
    "step_seconds/commit": STEP_BUCKETS,
    "adapter_load_seconds": LOAD_BUCKETS,
    "batch_size": COUNT_BUCKETS,
    "adapters_per_batch": COUNT_BUCKETS,
}


@dataclass(slots=True)
class SequenceTimes:
    """Moments of a request that has not ended, in seconds of the metrics' clock."""

    arrival: float
    start: float | None = None  # the first plan with it
    first_token: float | None = None
    interrupted: float | None = None  # the last answer of ranks that are lost, if it had tokens


class EngineMetrics:
    """What one replica measures; `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.failures: Counter[FailureCause] = Counter(dict.fromkeys(FailureCause, 0))
        self.counters = EngineCounters()
        self._clock = clock
        self._histograms = {name: Histogram(bounds) for name, bounds in BUCKETS.items()}
        self._times: dict[int, SequenceTimes] = {}  # by sequence
        self._unstarted: dict[int, float] = {}  # arrival by sequence, the oldest in front
        self._slots: dict[int, int | None] = {}  # of running sequences
        self._occupants: dict[int, str] = {}  # adapter last put into each slot
        self._step_began = 0.0
        self._step_answered = 0.0

    def histograms(self) -> dict[str, HistogramCounts]:
        """Return all counts as they are now."""
        return {name: one.counts() for name, one in self._histograms.items()}

    def oldest_wait(self) -> float:
        """Return how long the sequence has waited that came first and has never run; else 0."""
        oldest = next(iter(self._unstarted.values()), None)
        return 0.0 if oldest is None else self._clock() - oldest

    # A sequence's life.

    def arrival(self) -> SequenceTimes:
        """Return the times of a request that comes now."""
        return SequenceTimes(self._clock())

    def queued(self, seq_id: int, times: SequenceTimes) -> None:
        """Note the sequence of a request, which is new or was `parked`."""
        self._times[seq_id] = times
        if times.start is None:
            self._unstarted[seq_id] = times.arrival

    def parked(self, times: SequenceTimes) -> None:
        """Note that a stream stands still: its ranks are lost."""
        if times.first_token is not None and times.interrupted is None:
            times.interrupted = self._step_answered

    def delivered(self, times: SequenceTimes, *, has_token: bool, is_end: bool) -> None:
        """Note that an event of a sequence is sent to its router."""
        if has_token and times.first_token is None and times.start is not None:
            times.first_token = self._clock()
            self._observe("prefill_time_seconds", times.first_token - times.start)
        if has_token and times.interrupted is not None:
            self._observe("stream_pause_seconds", self._clock() - times.interrupted)
            times.interrupted = None
        if is_end and times.first_token is not None:
            self._observe("decode_time_seconds", self._clock() - times.first_token)

    def removed(self, seq_id: int) -> None:
        """Note that a sequence has ended, or was aborted."""
        self._times.pop(seq_id, None)
        self._unstarted.pop(seq_id, None)

    # A step's life.

    def step_begins(self) -> None:
        """Note that the scheduler is asked for a plan."""
        self._step_began = self._clock()

    def planned(self, plan: Plan) -> None:
        """Note the plan, which is about to be sent to the ranks."""
        now = self._clock()
        self._observe("step_seconds/plan", now - self._step_began)
        for seq_id in plan.ends:
            self._slots.pop(seq_id, None)
        for start in plan.starts:
            self._slots[start.seq_id] = start.slot
            arrival = self._unstarted.pop(start.seq_id, None)
            if arrival is not None:  # not one that was preempted and is back
                self._times[start.seq_id].start = now
                self._observe("queue_time_seconds", now - arrival)
        self._observe("batch_size", len(plan.chunks))
        slots = {self._slots.get(chunk.seq_id) for chunk in plan.chunks}
        self._observe("adapters_per_batch", len(slots - {None}))

    def sent_ahead(self) -> None:
        """Note that the ranks have the plan while they run the step before it."""
        self.counters.steps_ahead += 1

    def answered(self, seconds: float) -> None:
        """Note that all ranks have answered, and how long they took for the step."""
        self._step_answered = self._clock()
        self._observe("step_seconds/ranks", seconds)

    def committed(self, output: StepOutput) -> None:
        """Note that the answer has been taken in."""
        self.counters.grammar_masks += output.num_masks
        self.counters.late_grammar_masks += output.num_late_masks
        self._observe("step_seconds/commit", self._clock() - self._step_answered)

    # An adapter's life in a slot.

    def load_begins(self, slot: int, adapter: str, clears: Sequence[tuple[int, str]]) -> float:
        """Note a load and whom it displaces; return the moment, for `load_ends`."""
        for cleared, evicted in (*clears, (slot, self._occupants.get(slot, ""))):
            if evicted and self._occupants.get(cleared) == evicted:
                del self._occupants[cleared]
                self.counters.adapter_evictions += 1
        self._occupants[slot] = adapter
        return self._clock()

    def load_ends(self, began: float) -> None:
        """Note that all ranks have an adapter."""
        self._observe("adapter_load_seconds", self._clock() - began)

    def load_fails(self, slot: int) -> None:
        """Note that an adapter could not be had or used."""
        self.counters.failed_adapter_loads += 1
        self._occupants.pop(slot, None)

    def unloaded(self, slots: Iterable[tuple[int, str]]) -> None:
        """Note slots that were freed because their adapter is not served any more."""
        for slot, adapter in slots:
            if self._occupants.get(slot) == adapter:
                del self._occupants[slot]

    def ranks_lost(self, cause: FailureCause) -> None:
        """Note why a group of ranks was given up; its sequences and slots go with it."""
        self.failures[cause] += 1
        self._times.clear()
        self._unstarted.clear()
        self._slots.clear()
        self._occupants.clear()

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)
