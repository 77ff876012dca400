"""How the scheduler and its ranks are doing: the one place where their progress meets a clock.

Health is the age of the last completed step while work is waiting, never that a process exists.
"""

import asyncio
from collections.abc import Callable, Mapping
from copy import copy

from msgspec.structs import replace

from cluster.engine.executor import Executor, ExecutorFailed
from cluster.engine.metrics import EngineMetrics
from cluster.errors import Unavailable
from cluster.messages import RankStatus, Status
from cluster.scheduler.scheduler import Scheduler
from cluster.scheduler.stats import SchedulerCounters, SchedulerStats

RETRY_AFTER_SECONDS = 5  # about what a restart of the ranks takes

NOTHING = SchedulerStats()  # what a scheduler that is not there has


class EngineStatus:
    """Remembers why the ranks are down and what earlier groups have counted."""

    def __init__(self, replica: str, clock: Callable[[], float]) -> None:
        self.metrics = EngineMetrics(clock)
        self.begun = asyncio.Event()  # the ranks have been up, or have failed
        self._replica = replica
        self._is_up = False
        self._reason = "the ranks are starting"
        self._num_groups = 0
        self._past = SchedulerCounters()  # of the schedulers of earlier groups

    @property
    def is_starting(self) -> bool:
        """Whether the ranks have never been up."""
        return self._num_groups == 0

    def up(self) -> None:
        """Note that the ranks take plans."""
        self._is_up = True
        self.begun.set()
        self._reason = ""
        self._num_groups += 1
        self.metrics.counters.restarts = self._num_groups - 1

    def down(self, failure: ExecutorFailed, scheduler: Scheduler | None) -> None:
        """Note that the ranks are lost, and with them the scheduler; what it counted is kept."""
        self._is_up = False
        self.begun.set()
        self._reason = failure.reason
        self.metrics.ranks_lost(failure.cause)
        if scheduler is not None:
            self._past.add(scheduler.stats().counters)

    def unavailable(self) -> Unavailable:
        """Return the error for whoever needs the ranks now."""
        return Unavailable(
            f"the ranks are down and will be back: {self._reason}", retry_after=RETRY_AFTER_SECONDS
        )

    def snapshot(
        self,
        call_id: int,
        scheduler: Scheduler | None,
        executor: Executor | None,
        held: Mapping[int, tuple[str, int]],
    ) -> Status:
        """Return everything a router may ask, as of now; `held` is (adapter, bytes) by slot."""
        late = self._late_ranks(executor)
        return Status(
            call_id=call_id,
            replica=self._replica,
            ready=self._is_up,
            healthy=self._is_up and not late,
            reason=late or self._reason,
            starting=self.is_starting,
            oldest_wait=self.metrics.oldest_wait(),
            scheduler=self._stats(scheduler, held),
            engine=copy(self.metrics.counters),
            ranks=() if executor is None else _ranks(executor),
            histograms=self.metrics.histograms(),
            failures={cause.value: count for cause, count in self.metrics.failures.items()},
        )

    def _late_ranks(self, executor: Executor | None) -> str:
        """Return which ranks are late with their step, as a reason; "": none is."""
        late = [] if executor is None else executor.late_ranks()
        return f"rank {late} takes far too long for its step" if late else ""

    def _stats(
        self, scheduler: Scheduler | None, held: Mapping[int, tuple[str, int]]
    ) -> SchedulerStats:
        stats = NOTHING if scheduler is None else scheduler.stats()
        counters = copy(self._past)
        counters.add(stats.counters)
        slots = tuple(
            replace(one, held_bytes=0 if one.loading else held.get(one.slot, ("", 0))[1])
            for one in stats.slots
        )
        return replace(stats, counters=counters, slots=slots)


def _ranks(executor: Executor) -> tuple[RankStatus, ...]:
    return tuple(
        RankStatus(
            rank=info.rank,
            pid=info.pid,
            alive=alive,
            last_step=last,
            last_step_age=executor.step_age(info.rank),
            device=info.device,
            weight_bytes=info.weight_bytes,
            kv_bytes=info.page_bytes * executor.pages.full
            + info.window_page_bytes * executor.pages.window
            + info.state_page_bytes * executor.pages.state,
        )
        for info, last, alive in zip(
            executor.infos, executor.last_step, executor.alive, strict=False
        )
    )
