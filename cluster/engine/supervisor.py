"""The lives of the ranks of one scheduler: started, stepped until they fail, and started again.

Owns the group of ranks and the scheduler that plans for it, which begin and end together; when they
end, every request is answered. Knows nothing of sockets, nor of who asks.
"""

import asyncio
import logging
from dataclasses import dataclass, replace
from math import inf

from cluster.engine.dispatcher import Dispatcher
from cluster.engine.executor import Executor
from cluster.engine.failure import ExecutorFailed, FailureCause
from cluster.engine.kv_event_feed import KvEventFeed
from cluster.engine.launcher import RankLauncher
from cluster.engine.lora_loader import LoraLoader, info_of
from cluster.engine.recording import Recording
from cluster.engine.status import EngineStatus
from cluster.engine.step_loop import StepLoop
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.replay.recorder import AnyScheduler

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
    """Runs one life after the other until it is cancelled; `wake` tells that there may be work."""

    def __init__(
        self,
        config: SupervisorConfig,
        launcher: RankLauncher,
        recording: Recording,
        owners: Dispatcher,
        adapters: LoraLoader,
        kv_feed: KvEventFeed,
        status: EngineStatus,
        wake: asyncio.Event,
    ) -> None:
        self.scheduler: AnyScheduler | None = None  # None while the ranks are down
        self.group: Executor | None = None
        self._config = config
        self._launcher = launcher
        self._recording = recording
        self._owners = owners
        self._adapters = adapters
        self._kv_feed = kv_feed
        self._status = status
        self._wake = wake

    async def run(self) -> None:
        """Start the ranks whenever they are down, and serve; returns only by an error, a bug."""
        try:
            while True:
                try:
                    await self._live()
                except ExecutorFailed as failure:
                    # As text: who keeps records would keep what the failure's frames hold, shards.
                    logger.error("%s; restarting all ranks", str(failure))
                    await self._bury(failure)
        finally:
            await self._kill_group()

    async def _live(self) -> None:
        """Start the ranks and serve until they fail."""
        config = self._config
        self.group = group = Executor(self._launcher, config.start_timeout, config.step_timeout)
        try:
            await group.start()
        except ExecutorFailed:
            await asyncio.sleep(config.restart_delay)
            raise
        if group.num_pages * config.scheduler.page_size < 2:
            reason = "the KV memory budget does not hold a single page"
            raise ExecutorFailed(reason, FailureCause.START)
        self.scheduler = self._recording.make_scheduler(
            replace(
                config.scheduler,
                num_pages=group.num_pages,
                num_host_pages=group.num_host_pages,
            ),
            self._kv_feed.observer,
        )
        self._kv_feed.cover(self.scheduler.contents)
        self._adapters.begin(self.scheduler)
        self._status.up()
        _tell_up(group)
        steps = StepLoop(
            group,
            self.scheduler,
            self._adapters,
            self._owners,
            self._kv_feed,
            self._status,
            config.ahead_rows,
        )
        await steps.run(lambda: self._idle(group))

    async def _idle(self, group: Executor) -> None:
        """Wait for an event, or for the news that the group has failed."""
        self._recording.flush()
        waking = asyncio.ensure_future(self._wake.wait())
        failing = asyncio.ensure_future(group.failed())
        try:
            await asyncio.wait((waking, failing), return_when=asyncio.FIRST_COMPLETED)
        finally:  # also when the shell is closed meanwhile
            waking.cancel()
            failing.cancel()
        if failing.done():
            failing.result()
        self._wake.clear()

    async def _bury(self, failure: ExecutorFailed) -> None:
        """Answer everything in flight with 503 and end what is left of the ranks."""
        self._status.down(failure, self.scheduler)
        self._kv_feed.clear()
        await self._kill_group()

    async def _kill_group(self) -> None:
        """End every request with the reason, then the ranks."""
        self._owners.fail_all(info_of(self._status.unavailable()))
        self.scheduler = None
        self._adapters.end()
        if self.group is not None:
            group, self.group = self.group, None
            await group.kill()


def _tell_up(group: Executor) -> None:
    for info in group.infos:
        logger.info(
            "rank %d is up: %d pages of KV, products by %s",
            info.rank,
            group.num_pages,
            info.products,
        )
        if info.unsteady:
            logger.warning(
                "rank %d: tokens may depend on what else is asked meanwhile, for on this CPU "
                "the bits of a row depend on its batch in %s",
                info.rank,
                ", ".join(info.unsteady),
            )
