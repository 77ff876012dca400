"""How the scheduler and its ranks are doing: the one place where their progress meets a clock.

Health is the age of the last completed step while work is waiting, never that a process exists.
"""

import asyncio
from collections.abc import Callable, Mapping

from cluster.engine.executor import Executor, ExecutorFailed
from cluster.engine.metrics import EngineMetrics
from cluster.errors import Unavailable
from cluster.messages import RankStatus, SlotStatus, Status
from cluster.scheduler.replay.recorder import AnyScheduler
from cluster.scheduler.stats import SchedulerStats

RETRY_AFTER_SECONDS = 5  # about what a restart of the ranks takes

NOTHING = SchedulerStats()  # what a scheduler that is not there has
COUNTERS = (
    "prompt_tokens",
    "cached_prompt_tokens",
    "generated_tokens",
    "preemptions",
    "evicted_pages",
    "adapter_loads",
    "saved_pages",
    "restored_pages",
    "evicted_host_pages",
    "forked_sequences",
    "late_hand_overs",
)


def _counters(stats: SchedulerStats) -> dict[str, int]:
    return {name: getattr(stats, name) for name in COUNTERS}


class EngineStatus:
    """Remembers when steps begin and end, and why the ranks are down."""

    def __init__(self, replica: str, clock: Callable[[], float]) -> None:
        self.metrics = EngineMetrics(clock)
        self._replica = replica
        self._clock = clock  # seconds
        self.begun = asyncio.Event()  # the ranks have been up, or have failed
        self._up = False
        self._reason = "the ranks are starting"
        self._lives = 0
        self._past = _counters(NOTHING)  # what earlier lives of the ranks have counted
        self._step = 0
        self._step_began: float | None = None  # the oldest in flight; None: none is

    @property
    def is_starting(self) -> bool:
        """Whether the ranks have never been up."""
        return self._lives == 0

    def up(self) -> None:
        """The ranks take plans."""
        self._up = True
        self.begun.set()
        self._reason = ""
        self._lives += 1
        self._step_began = None

    def down(self, failure: ExecutorFailed, scheduler: AnyScheduler | None) -> None:
        """The ranks are lost, and with them the scheduler; what it counted is kept."""
        self._up = False
        self.begun.set()
        self._reason = failure.reason
        self.metrics.ranks_lost(failure.cause)
        if scheduler is not None:
            self._past = self._totals(scheduler.stats())

    def step_begins(self, step: int) -> None:
        """A plan is on its way."""
        self._step = step
        if self._step_began is None:
            self._step_began = self._clock()

    def step_ends(self, *, is_stepping: bool) -> None:
        """All ranks have answered a step; whether the one after it is with them already."""
        self._step_began = self._clock() if is_stepping else None

    def unavailable(self) -> Unavailable:
        """Return the error for whoever needs the ranks now."""
        return Unavailable(
            f"the ranks are down and will be back: {self._reason}", retry_after=RETRY_AFTER_SECONDS
        )

    def snapshot(
        self,
        call_id: int,
        scheduler: AnyScheduler | None,
        group: Executor | None,
        held: Mapping[int, tuple[str, int]],
    ) -> Status:
        """Return everything a router may ask, as of now; `held` is (adapter, bytes) by slot."""
        stats = NOTHING if scheduler is None else scheduler.stats()
        return Status(
            call_id=call_id,
            replica=self._replica,
            ready=self._up,
            healthy=self._up,
            reason=self._reason,
            starting=self.is_starting,
            step=self._step,
            restarts=max(0, self._lives - 1),
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_waiting_for_adapter=stats.num_waiting_for_adapter,
            free_pages=stats.free_pages,
            cached_pages=stats.cached_pages,
            held_pages=stats.held_pages,
            total_pages=stats.total_pages,
            num_slots=stats.num_slots,
            free_host_pages=stats.free_host_pages,
            cached_host_pages=stats.cached_host_pages,
            total_host_pages=stats.total_host_pages,
            longest_slot_wait=stats.longest_slot_wait,
            slot_wait_bound=stats.slot_wait_bound,
            adapter_memory=stats.adapter_memory,
            slots=tuple(
                SlotStatus(
                    slot=s.slot,
                    adapter=s.adapter,
                    loading=s.loading,
                    leases=s.leases,
                    pinned=s.pinned,
                    claimed_bytes=s.num_bytes,
                    held_bytes=0 if s.loading else held.get(s.slot, ("", 0))[1],
                )
                for s in stats.slots
            ),
            ranks=() if group is None else self._ranks(group),
            histograms=self.metrics.histograms(),
            failures={cause.value: count for cause, count in self.metrics.failures.items()},
            oldest_wait=self.metrics.oldest_wait(),
            adapter_evictions=self.metrics.num_evictions,
            failed_adapter_loads=self.metrics.num_failed_loads,
            steps_ahead=self.metrics.num_steps_ahead,
            **self._totals(stats),
        )

    def _totals(self, stats: SchedulerStats) -> dict[str, int]:
        return {name: self._past[name] + count for name, count in _counters(stats).items()}

    def _ranks(self, group: Executor) -> tuple[RankStatus, ...]:
        age = 0.0 if self._step_began is None else self._clock() - self._step_began
        return tuple(
            RankStatus(
                rank=info.rank,
                pid=info.pid,
                alive=self._up,
                last_step=last,
                last_step_age=age if last < self._step else 0.0,
                device=info.device,
                weight_bytes=info.weight_bytes,
                kv_bytes=info.page_bytes * group.num_pages,
            )
            for info, last in zip(group.infos, group.last_step, strict=False)
        )
