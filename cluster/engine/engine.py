"""The scheduler with its clock and sockets: what routers and the pool ask of one replica.

Owns the connections of routers and all that goes on behind them: the lives of the ranks, and
adapter loads in the background. Every decision about sequences, pages and slots is the Scheduler's.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.engine.dispatcher import Dispatcher
from cluster.engine.kv_event_feed import KvEventFeed
from cluster.engine.kv_event_publisher import KvEventPublisher, KvEventPublisherConfig
from cluster.engine.launcher import RankLauncher
from cluster.engine.lora_loader import LoraLoader, ShardSource, info_of
from cluster.engine.recording import Recording, RecordingConfig
from cluster.engine.server import EngineServer, RouterConnection
from cluster.engine.status import EngineStatus
from cluster.engine.supervisor import Supervisor, SupervisorConfig
from cluster.errors import TopworkError
from cluster.messages import Events, SchedulerAddress, Status
from cluster.request import Request, TokenEvent

logger = logging.getLogger("topwork.scheduler")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the shell needs beyond what its ranks do; times in seconds."""

    replica: str
    ranks: SupervisorConfig
    request_timeout: float | None = None  # until a request ends with an error
    kv_publisher: KvEventPublisherConfig | None = (
        None  # None: only routers that ask hear of KV events
    )
    recording: RecordingConfig | None = None  # None: nothing is written down


class Engine:
    """Runs one scheduler and its ranks until it is closed."""

    def __init__(self, config: EngineConfig, launcher: RankLauncher, pool: ShardSource) -> None:
        self._replica = config.replica
        self._status = EngineStatus(config.replica, time.monotonic)
        self._publisher = KvEventPublisher(config.kv_publisher) if config.kv_publisher else None
        self._kv_feed = KvEventFeed(config.ranks.scheduler.base_digest, time.time, self._publisher)
        self._door = EngineServer(self, self._kv_feed)
        self._recording = Recording(config.recording)
        measures = self._status.measures
        self._wake = asyncio.Event()
        self._owners = Dispatcher(config.request_timeout, self._expire, measures)
        self._adapters = LoraLoader(pool, self._owners, self._wake.set, measures)
        self._lives = Supervisor(
            config.ranks,
            launcher,
            self._recording,
            self._owners,
            self._adapters,
            self._kv_feed,
            self._status,
            self._wake,
        )
        self._main: asyncio.Task[None] | None = None

    async def start(self, host: str) -> SchedulerAddress:
        """Open the door for routers and begin to bring up the ranks; returns where the door is."""
        if self._publisher is not None:
            self._publisher.open()
        self._kv_feed.clear()
        self._recording.open()
        secret = secrets.token_bytes(32)
        port = await self._door.open(host, secret)
        self._main = asyncio.create_task(self._lives.run())
        return SchedulerAddress(self._replica, host, port, secret)

    def on_crash(self, act: Callable[[], None]) -> None:
        """Call `act` if the step loop ends by an error of its own: a bug, not a lost rank."""
        assert self._main is not None, "start() comes first"

        def look(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                logger.critical("the scheduler crashed", exc_info=task.exception())
                act()

        self._main.add_done_callback(look)

    async def came_up(self) -> None:
        """Wait until the ranks are up for the first time.

        Raises:
            Unavailable: if they could not be started, with the reason; they are tried again.
        """
        await self._status.begun.wait()
        if self._status.is_starting:
            raise self._status.unavailable()

    async def drain(self, timeout: float) -> int:
        """Let routers go elsewhere and end what runs; return how many requests are left.

        Until the last router has hung up all requests are taken, as one may have been on its way.
        """
        self._door.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._door.emptied()
        return self._owners.count

    async def close(self) -> None:
        """End the ranks and close the door."""
        assert self._main is not None, "start() comes first"
        self._main.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._main
        await self._door.close()
        self._recording.close()
        if self._publisher is not None:
            await self._publisher.close()

    # What routers ask; all on the event loop, between two awaits of the step loop.

    def submit(self, router: RouterConnection, requests: tuple[Request, ...]) -> None:
        """Queue the choices of one prompt, all or none; or answer at once why not."""
        try:
            if self._lives.scheduler is None:
                raise self._status.unavailable()
            seq_ids = self._lives.scheduler.add_all(requests)
        except TopworkError as error:
            router.send(Events(tuple(_failed(r.request_id, error) for r in requests)))
            return
        self._owners.enter(router, seq_ids, requests)
        self._wake.set()

    def abort(self, router: RouterConnection, request_id: str) -> None:
        """Drop a request; one that has just ended is nobody's any more."""
        seq_id = self._owners.leave(router, request_id)
        if seq_id is None:
            return
        assert self._lives.scheduler is not None, "an owned sequence lives in a scheduler"
        self._lives.scheduler.abort(seq_id)
        self._wake.set()

    def abort_all(self, router: RouterConnection) -> None:
        """Drop everything of a router that has gone."""
        for request_id in tuple(router.sequences):
            self.abort(router, request_id)

    def unload(self, router: RouterConnection, call_id: int, adapter: str, force: bool) -> None:
        """Forget an adapter; the answer goes out when nothing of it is left."""
        self._adapters.unload(self._lives.scheduler, router, call_id, adapter, force)

    def allow(self, adapter: str) -> None:
        """Let requests for an adapter in again whose unload is not complete."""
        self._adapters.allow(self._lives.scheduler, adapter)

    def keep_pinned(self, adapters: dict[str, int]) -> None:
        """Keep exactly these adapters in their slots, in all lives of the ranks."""
        self._adapters.keep_pinned(self._lives.scheduler, adapters)

    def status(self, call_id: int) -> Status:
        """Return counts and health as of now."""
        return self._status.snapshot(
            call_id, self._lives.scheduler, self._lives.group, self._adapters.held
        )

    def _expire(self, seq_id: int) -> None:
        """Learn that a request has taken longer than it may."""
        assert self._lives.scheduler is not None, "an owned sequence lives in a scheduler"
        self._owners.deliver(self._lives.scheduler.expire(seq_id))
        self._wake.set()


def _failed(request_id: str, error: TopworkError) -> TokenEvent:
    return TokenEvent(request_id, finish_reason="error", error=info_of(error))
