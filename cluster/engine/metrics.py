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
    PREEMPTIONS_BUCKETS,
    STEP_BUCKETS,
    STEP_TOKENS_BUCKETS,
    WAIT_BUCKETS,
    Histogram,
    HistogramCounts,
)
from cluster.messages import EngineCounters, RequestTimes
from worker.protocol import Plan, StepOutput

BUCKETS: dict[str, tuple[float, ...]] = {
    "queue_time_seconds": WAIT_BUCKETS,
    "prefill_time_seconds": WAIT_BUCKETS,
    "decode_time_seconds": E2E_BUCKETS,
    "inference_time_seconds": E2E_BUCKETS,
    "request_num_preemptions": PREEMPTIONS_BUCKETS,
    "stream_pause_seconds": E2E_BUCKETS,
    "step_seconds/plan": STEP_BUCKETS,
    "step_seconds/ranks": STEP_BUCKETS,
    "step_seconds/commit": STEP_BUCKETS,
    "adapter_load_seconds": LOAD_BUCKETS,
    "batch_size": COUNT_BUCKETS,
    "iteration_tokens": STEP_TOKENS_BUCKETS,
    "adapters_per_batch": COUNT_BUCKETS,
}


@dataclass(frozen=True, slots=True)
class StepsSoFar:
    """What the ranks had done at one moment."""

    number: int
    seconds: float  # that they took together


@dataclass(slots=True)
class RequestTrace:
    """What is known of a request beyond its moments, because its router asked for it."""

    adapter: str
    load: tuple[float, float] | None = None  # of its adapter into a slot, while it waited
    at_start: StepsSoFar | None = None
    at_first_token: StepsSoFar | None = None
    num_recoveries: int = 0


@dataclass(slots=True)
class SequenceTimes:
    """Moments of a request that has not ended, in seconds of the metrics' clock."""

    arrival: float
    start: float | None = None  # the first plan with it
    first_token: float | None = None
    interrupted: float | None = None  # the last answer of ranks that are lost, if it had tokens
    is_begun: bool = False  # these ranks have had it in a plan
    num_preemptions: int = 0  # from which it is back
    trace: RequestTrace | None = None  # None: nobody asks


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
        self._loads: dict[str, tuple[float, float]] = {}  # the last one of each that is in a slot
        self._step_began = 0.0
        self._step_answered = 0.0
        self._started_ahead: list[RequestTrace] = []  # while ranks run the step before theirs

    def histograms(self) -> dict[str, HistogramCounts]:
        """Return all counts as they are now."""
        return {name: one.counts() for name, one in self._histograms.items()}

    def oldest_wait(self) -> float:
        """Return how long the sequence has waited that came first and has never run; else 0."""
        oldest = next(iter(self._unstarted.values()), None)
        return 0.0 if oldest is None else self._clock() - oldest

    # A sequence's life.

    def arrival(self, trace: RequestTrace | None = None) -> SequenceTimes:
        """Return the times of a request that comes now."""
        return SequenceTimes(self._clock(), trace=trace)

    def queued(self, seq_id: int, times: SequenceTimes) -> None:
        """Note the sequence of a request, which is new or was `parked`."""
        self._times[seq_id] = times
        times.is_begun = False
        if times.start is None:
            self._unstarted[seq_id] = times.arrival

    def parked(self, times: SequenceTimes) -> None:
        """Note that a stream stands still: its ranks are lost."""
        if times.first_token is not None and times.interrupted is None:
            times.interrupted = self._step_answered
        if times.trace is not None:
            times.trace.num_recoveries += 1

    def delivered(self, times: SequenceTimes, *, has_token: bool, is_end: bool) -> bool:
        """Note that an event of a sequence is sent to its router; tell if its times are news."""
        is_news = is_end
        if has_token and times.first_token is None and times.start is not None:
            times.first_token = self._clock()
            self._observe("prefill_time_seconds", times.first_token - times.start)
            if times.trace is not None:
                times.trace.at_first_token = self._steps_so_far()
                is_news = True
        if has_token and times.interrupted is not None:
            self._observe("stream_pause_seconds", self._clock() - times.interrupted)
            times.interrupted = None
        if is_end and times.first_token is not None and times.start is not None:
            now = self._clock()
            self._observe("decode_time_seconds", now - times.first_token)
            self._observe("inference_time_seconds", now - times.start)
            self._observe("request_num_preemptions", times.num_preemptions)
        return is_news

    def request_times(
        self, name: str, times: SequenceTimes, *, is_end: bool
    ) -> RequestTimes | None:
        """Return what a router asked to know of a request; None if it did not, or nothing is."""
        trace, start = times.trace, times.start
        if trace is None or start is None or trace.at_start is None:
            return None
        now, so_far = self._clock(), self._steps_so_far()
        first = trace.at_first_token or so_far
        return RequestTimes(
            name,
            start - times.arrival,
            load_start=None if trace.load is None else trace.load[0] - times.arrival,
            load_end=None if trace.load is None else trace.load[1] - times.arrival,
            first_token=None if times.first_token is None else times.first_token - times.arrival,
            end=now - times.arrival if is_end else None,
            num_prefill_steps=first.number - trace.at_start.number,
            prefill_rank_seconds=first.seconds - trace.at_start.seconds,
            num_decode_steps=so_far.number - first.number,
            decode_rank_seconds=so_far.seconds - first.seconds,
            num_preemptions=times.num_preemptions,
            num_recoveries=trace.num_recoveries,
        )

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
            self._begins(start.seq_id, now)
        self._observe("batch_size", len(plan.chunks))
        slots = {self._slots.get(chunk.seq_id) for chunk in plan.chunks}
        self._observe("adapters_per_batch", len(slots - {None}))

    def sent(self, num_tokens: int, *, is_ahead: bool) -> None:
        """Note that the ranks have the plan, maybe while they run the step before it."""
        self.counters.steps_ahead += is_ahead
        if not is_ahead:
            self._started_ahead.clear()
        self._observe("iteration_tokens", num_tokens)

    def answered(self, seconds: float) -> None:
        """Note that all ranks have answered, and how long they took for the step."""
        self._step_answered = self._clock()
        self._observe("step_seconds/ranks", seconds)
        for trace in self._started_ahead:  # what ran until now was none of their steps
            trace.at_start = self._steps_so_far()
        self._started_ahead.clear()

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
                self._leaves(cleared)
                self.counters.adapter_evictions += 1
        self._occupants[slot] = adapter
        return self._clock()

    def load_ends(self, adapter: str, began: float) -> None:
        """Note that all ranks have an adapter."""
        now = self._clock()
        self._observe("adapter_load_seconds", now - began)
        self._loads[adapter] = began, now

    def load_fails(self, slot: int) -> None:
        """Note that an adapter could not be had or used."""
        self.counters.failed_adapter_loads += 1
        self._leaves(slot)

    def unloaded(self, slots: Iterable[tuple[int, str]]) -> None:
        """Note slots that were freed because their adapter is not served any more."""
        for slot, adapter in slots:
            if self._occupants.get(slot) == adapter:
                self._leaves(slot)

    def ranks_lost(self, cause: FailureCause) -> None:
        """Note why a group of ranks was given up; its sequences and slots go with it."""
        self.failures[cause] += 1
        self._times.clear()
        self._unstarted.clear()
        self._slots.clear()
        self._occupants.clear()
        self._loads.clear()
        self._started_ahead.clear()

    def _leaves(self, slot: int) -> None:
        self._loads.pop(self._occupants.pop(slot, ""), None)

    def _begins(self, seq_id: int, now: float) -> None:
        """Note that a sequence starts: new, back after a preemption, or behind lost ranks."""
        times = self._times.get(seq_id)
        if times is None:  # nobody waits for its events
            return
        times.num_preemptions += times.is_begun
        times.is_begun = True
        arrival = self._unstarted.pop(seq_id, None)
        if arrival is not None:
            times.start = now
            self._observe("queue_time_seconds", now - arrival)
            if times.trace is not None:
                self._begins_trace(times.trace, arrival)

    def _begins_trace(self, trace: RequestTrace, arrival: float) -> None:
        trace.at_start = self._steps_so_far()
        self._started_ahead.append(trace)  # `sent` tells if one runs
        load = self._loads.get(trace.adapter)
        if load is not None and load[1] > arrival:
            trace.load = max(load[0], arrival), load[1]

    def _steps_so_far(self) -> StepsSoFar:
        counts = self._histograms["step_seconds/ranks"].counts()
        return StepsSoFar(counts.number, counts.total)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)
