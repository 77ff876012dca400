"""The engine's core: ranks brought up, stepped until they fail, and brought up again.

vLLM's EngineCore and its busy loop. Owns the executor and the scheduler that plans for it, which
begin and end together; streams go on in the next ones. While a step runs, the one after it is
planned and sent, so that the ranks go from one to the next without waiting. That is done late in
the step, so that who arrives meanwhile is not left out of it; and only if the ranks leave a core
for it, or it would cost them more than it gains.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import inf

from cluster.engine.dispatcher import Dispatcher
from cluster.engine.executor import Executor, ExecutorFailed, FailureCause, RankLauncher
from cluster.engine.kv_event_feed import KvEventFeed
from cluster.engine.lora_loader import LoraLoader
from cluster.engine.recording import Recording
from cluster.engine.status import EngineStatus
from cluster.engine.step_limit import LEAST, StepLimit
from cluster.errors import error_info
from cluster.request import TokenEvent
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.scheduler import Scheduler
from worker.protocol import GENESIS, Plan, encode_plan

logger = logging.getLogger("topwork.scheduler")

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
        self._in_flight: deque[tuple[Plan, int]] = deque()  # with its rows

    @property
    def sequences_in_flight(self) -> set[int]:
        """Return the sequences in the steps that the ranks have not answered."""
        return {chunk.seq_id for plan, _ in self._in_flight for chunk in plan.chunks}

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
            plan, num_rows = self._in_flight[0]
            is_small = num_rows <= self._ahead_rows
            if is_small and not await self._executor.has_answered(plan.step, self._pace.rest):
                self._begin_step()
            output = await self._executor.output(plan.step)
            self._end_step()
            events = self._scheduler.commit(output)
            self._metrics.committed(output)

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
        num_rows = sum(len(chunk.token_ids) for chunk in plan.chunks)
        self._metrics.sent(num_rows, is_ahead=bool(self._in_flight))
        if not self._in_flight:
            self._pace.begins()
        self._in_flight.append((plan, num_rows))
        self._executor.send(frame, num_rows)

    def _end_step(self) -> None:
        self._in_flight.popleft()
        self._metrics.answered(self._pace.ends())
        self._pace.begins()  # with the one after it, if they have that already


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    """How ranks are started and stepped; times in seconds."""

    scheduler: SchedulerConfig  # num_pages is filled in when the ranks have said what fits
    start_timeout: float  # until all ranks must take plans
    step_timeout: float  # until all ranks must have answered one, where none like it was measured
    least_step_timeout: float = LEAST  # and where one was, however short
    restart_delay: float = 1.0  # between two failed attempts to start the ranks
    recovery_timeout: float = 120.0  # that streams wait for lost ranks before they end
    ahead_rows: float = inf  # the next step is planned while one of at most so many rows runs


class Supervisor:
    """Runs one group of ranks after the other; `wake` is set when there may be work."""

    def __init__(
        self,
        config: SupervisorConfig,
        launcher: RankLauncher,
        recording: Recording,
        dispatcher: Dispatcher,
        lora_loader: LoraLoader,
        kv_feed: KvEventFeed,
        status: EngineStatus,
        wake: asyncio.Event,
    ) -> None:
        self.scheduler: Scheduler | None = None  # None while the ranks are down
        self.executor: Executor | None = None
        self._config = config
        self._launcher = launcher
        self._recording = recording
        self._dispatcher = dispatcher
        self._lora_loader = lora_loader
        self._kv_feed = kv_feed
        self._status = status
        self._wake = wake
        self._steps: StepLoop | None = None
        self._giving_up: asyncio.TimerHandle | None = None  # while lost ranks are expected back
        self._limit = StepLimit(config.step_timeout, config.least_step_timeout)

    async def run(self) -> None:
        """Start the ranks whenever they are down, and serve; returns only by an error, a bug."""
        try:
            while True:
                try:
                    await self._serve()
                except ExecutorFailed as failure:
                    # As text: who keeps records would keep what the failure's frames hold, shards.
                    logger.error("%s; restarting all ranks", str(failure))
                    await self._lose_ranks(failure)
        finally:
            if self._giving_up is not None:
                self._giving_up.cancel()
            self._dispatcher.fail_all(error_info(self._status.unavailable()))
            self._lora_loader.answer_unloads()
            await self._end_ranks()

    async def _serve(self) -> None:
        """Start the ranks and serve until they fail."""
        config = self._config
        executor = Executor(self._launcher, config.start_timeout, self._limit)
        self.executor = executor
        try:
            await executor.start()
        except ExecutorFailed:
            await asyncio.sleep(config.restart_delay)
            raise
        window = executor.infos[0].window
        pages = executor.pages
        if min(pages.full, pages.window if window else pages.full) * config.scheduler.page_size < 2:
            reason = "the KV memory budget does not hold a single page"
            raise ExecutorFailed(reason, FailureCause.START)
        self.scheduler = self._recording.make_scheduler(
            config.scheduler.with_pages(window, pages, executor.host_pages),
            self._kv_feed.observer,
        )
        self._kv_feed.attach(self.scheduler.contents)
        self._lora_loader.restore_pins(self.scheduler)
        self._status.up()
        _log_ranks(executor)
        self._warn_of_short_pages(executor)
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        self._dispatcher.attach(self.scheduler)
        self._lora_loader.repeat_unloads(self.scheduler)
        self._steps = StepLoop(
            executor,
            self.scheduler,
            self._lora_loader,
            self._dispatcher,
            self._kv_feed,
            self._status,
            config.ahead_rows,
        )
        await self._steps.run(lambda: self._idle(executor))

    async def _idle(self, executor: Executor) -> None:
        """Wait for an event, or for the failure of the group."""
        self._recording.flush()
        waking = asyncio.ensure_future(self._wake.wait())
        failing = asyncio.ensure_future(executor.failed())
        try:
            await asyncio.wait((waking, failing), return_when=asyncio.FIRST_COMPLETED)
        finally:  # also when the engine is closed meanwhile
            waking.cancel()
            failing.cancel()
        if failing.done():
            failing.result()
        self._wake.clear()

    async def _lose_ranks(self, failure: ExecutorFailed) -> None:
        """Keep the streams for the next scheduler, and end what is left of the ranks."""
        config, is_late = self._config, failure.cause is FailureCause.STEP_TIMEOUT
        patience = self._limit.patience_after(was_exceeded=is_late)
        self._limit = StepLimit(config.step_timeout, config.least_step_timeout, patience)
        self._status.down(failure, self.scheduler)
        self._kv_feed.clear()
        if self._steps is not None:
            self._dispatcher.park(self._steps.sequences_in_flight, self._lora_loader.loading)
            if self._giving_up is None:
                loop = asyncio.get_running_loop()
                self._giving_up = loop.call_later(self._config.recovery_timeout, self._give_up)
        await self._end_ranks()

    def _give_up(self) -> None:
        """End what waits for ranks that do not come back."""
        self._dispatcher.fail_all(error_info(self._status.unavailable()))
        self._lora_loader.answer_unloads()

    def _warn_of_short_pages(self, executor: Executor) -> None:
        """Say so if no sequence can be as long as configured: what GPUs have is known only now."""
        config = self._config.scheduler
        if executor.pages.full * config.page_size < config.max_model_len:
            logger.warning(
                "KV memory has room for %d tokens, and sequences may have %d: longer prompts are "
                "refused, and answers end there",
                executor.pages.full * config.page_size,
                config.max_model_len,
            )

    async def _end_ranks(self) -> None:
        self.scheduler = self._steps = None
        self._lora_loader.reset()
        if self.executor is not None:
            executor, self.executor = self.executor, None
            await executor.kill()


def _log_ranks(executor: Executor) -> None:
    for info in executor.infos:
        logger.info(
            "rank %d is up: %d pages of KV, products by %s",
            info.rank,
            executor.pages.full,
            info.products,
        )
        if info.batch_variant_linears:
            logger.warning(
                "rank %d: tokens may depend on what else is asked meanwhile, for on this CPU "
                "the bits of a row depend on its batch in %s",
                info.rank,
                ", ".join(info.batch_variant_linears),
            )
