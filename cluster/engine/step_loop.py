"""The steps of one group of ranks: planned, sent, and committed when all ranks have answered.

While a step runs, the one after it is planned and sent, so that the ranks go from one to the next
without waiting. That is done late in the step, so that who arrives meanwhile is not left out of it;
and only if the ranks leave a core for it, or it would cost them more than it gains.
"""

import time
from collections import deque
from collections.abc import Awaitable, Callable

from cluster.engine.dispatcher import Dispatcher
from cluster.engine.executor import Executor
from cluster.engine.kv_event_feed import KvEventFeed
from cluster.engine.lora_loader import LoraLoader
from cluster.engine.status import EngineStatus
from cluster.request import TokenEvent
from cluster.scheduler.scheduler import Scheduler
from worker.protocol import GENESIS, encode_plan

PLAN_AFTER = 0.6  # of the shortest of the last steps; the rest is for planning and sending
NUM_REMEMBERED = 8  # steps; one with a long prompt says nothing of the next


class StepPace:
    """How long the last steps took, and so how long to wait before the next is planned."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock  # seconds
        self._durations: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._begun = 0.0

    def begins(self) -> None:
        """The ranks have begun with a step just now."""
        self._begun = self._clock()

    def ends(self) -> float:
        """They have ended it; returns the seconds that it took."""
        self._durations.append(self._clock() - self._begun)
        return self._durations[-1]

    @property
    def rest(self) -> float:
        """Return the seconds from now until the step after it should be planned."""
        if not self._durations:
            return 0.0
        return self._begun + PLAN_AFTER * min(self._durations) - self._clock()


class StepLoop:
    """Runs steps until the group fails."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        lora_loader: LoraLoader,
        dispatcher: Dispatcher,
        kv_feed: KvEventFeed,
        status: EngineStatus,
        ahead_rows: float,
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._lora_loader = lora_loader
        self._dispatcher = dispatcher
        self._kv_feed = kv_feed
        self._status = status
        self._metrics = status.metrics
        self._ahead_rows = ahead_rows  # of the step that runs, beyond which none is planned ahead
        self._pace = StepPace(time.monotonic)
        self._digest = GENESIS
        self._in_flight: deque[tuple[int, int]] = deque()  # step and its rows

    async def run(self, idle: Callable[[], Awaitable[None]]) -> None:
        """Step while there is work, and wait with `idle` while there is none.

        Raises:
            ExecutorFailed: when the ranks are lost.
        """
        # Of the last step, sent to routers while the ranks run the next.
        events: list[tuple[int, TokenEvent]] = []
        while True:
            if not self._in_flight:
                self._begin_step()
            self._dispatcher.deliver(events)
            events = []
            if not self._in_flight:
                await idle()
                continue
            step, num_rows = self._in_flight[0]
            is_small = num_rows <= self._ahead_rows
            if is_small and not await self._executor.has_answered(step, self._pace.rest):
                self._begin_step()
            output = await self._executor.output(step)
            self._end_step()
            events = self._scheduler.commit(output)
            self._metrics.committed()

    def _begin_step(self) -> None:
        """Send the next plan, if there is one."""
        self._metrics.step_begins()
        plan = self._scheduler.schedule()
        begins = plan is not None and bool(plan.chunks)
        self._lora_loader.run_pending(
            self._executor,
            self._scheduler,
            begins_step=begins,
            is_stepping=begins or bool(self._in_flight),
        )
        self._kv_feed.flush()
        if plan is None:
            return
        frame, self._digest = encode_plan(plan, self._digest)
        self._metrics.planned(plan)
        if self._in_flight:
            self._metrics.sent_ahead()
        else:
            self._pace.begins()
        num_rows = sum(len(chunk.token_ids) for chunk in plan.chunks)
        self._in_flight.append((plan.step, num_rows))
        self._executor.send(frame)

    def _end_step(self) -> None:
        self._in_flight.popleft()
        self._metrics.answered(self._pace.ends())
        self._pace.begins()  # with the one after it, if they have that already
