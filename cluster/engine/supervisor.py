"""Starts the ranks of one engine, serves until they fail, and starts them again.

Owns the executor and the scheduler that plans for it, which begin and end together; when they end,
every request is answered.
"""

import asyncio
import logging
from dataclasses import dataclass, replace
from math import inf

from cluster.engine.dispatcher import Dispatcher
from cluster.engine.executor import Executor, ExecutorFailed, FailureCause, RankLauncher
from cluster.engine.kv_event_feed import KvEventFeed
from cluster.engine.lora_loader import LoraLoader, info_of
from cluster.engine.recording import Recording
from cluster.engine.status import EngineStatus
from cluster.engine.step_loop import StepLoop
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.scheduler import Scheduler

logger = logging.getLogger("topwork.scheduler")


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    """How ranks are started and stepped; times in seconds."""

    scheduler: SchedulerConfig  # num_pages is filled in when the ranks have said what fits
    start_timeout: float  # until all ranks must take plans
    step_timeout: float  # until all ranks must have answered one
    restart_delay: float = 1.0  # between two failed attempts to start the ranks
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

    async def run(self) -> None:
        """Start the ranks whenever they are down, and serve; returns only by an error, a bug."""
        try:
            while True:
                try:
                    await self._serve()
                except ExecutorFailed as failure:
                    # As text: who keeps records would keep what the failure's frames hold, shards.
                    logger.error("%s; restarting all ranks", str(failure))
                    await self._tear_down(failure)
        finally:
            await self._stop_ranks()

    async def _serve(self) -> None:
        """Start the ranks and serve until they fail."""
        config = self._config
        executor = Executor(self._launcher, config.start_timeout, config.step_timeout)
        self.executor = executor
        try:
            await executor.start()
        except ExecutorFailed:
            await asyncio.sleep(config.restart_delay)
            raise
        if executor.num_pages * config.scheduler.page_size < 2:
            reason = "the KV memory budget does not hold a single page"
            raise ExecutorFailed(reason, FailureCause.START)
        self.scheduler = self._recording.make_scheduler(
            replace(
                config.scheduler,
                num_pages=executor.num_pages,
                num_host_pages=executor.num_host_pages,
            ),
            self._kv_feed.observer,
        )
        self._kv_feed.attach(self.scheduler.contents)
        self._lora_loader.restore_pins(self.scheduler)
        self._status.up()
        _log_ranks(executor)
        steps = StepLoop(
            executor,
            self.scheduler,
            self._lora_loader,
            self._dispatcher,
            self._kv_feed,
            self._status,
            config.ahead_rows,
        )
        await steps.run(lambda: self._idle(executor))

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

    async def _tear_down(self, failure: ExecutorFailed) -> None:
        """Answer everything in flight with 503 and end what is left of the ranks."""
        self._status.down(failure, self.scheduler)
        self._kv_feed.clear()
        await self._stop_ranks()

    async def _stop_ranks(self) -> None:
        """End every request with the reason, then the ranks."""
        self._dispatcher.fail_all(info_of(self._status.unavailable()))
        self.scheduler = None
        self._lora_loader.reset()
        if self.executor is not None:
            executor, self.executor = self.executor, None
            await executor.kill()


def _log_ranks(executor: Executor) -> None:
    for info in executor.infos:
        logger.info(
            "rank %d is up: %d pages of KV, products by %s",
            info.rank,
            executor.num_pages,
            info.products,
        )
        if info.batch_variant_linears:
            logger.warning(
                "rank %d: tokens may depend on what else is asked meanwhile, for on this CPU "
                "the bits of a row depend on its batch in %s",
                info.rank,
                ", ".join(info.batch_variant_linears),
            )
