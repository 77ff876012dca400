"""One replica: a scheduler and its ranks, with their clock and sockets.

Answers what routers and the adapter pool ask over their connections. Every decision about
sequences, pages and slots is the Scheduler's.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.engine.core import Supervisor, SupervisorConfig
from cluster.engine.dispatcher import Dispatcher
from cluster.engine.executor import RankLauncher
from cluster.engine.grammar_gate import GrammarGate
from cluster.engine.kv_event_feed import KvEventFeed
from cluster.engine.kv_event_publisher import KvEventPublisher, KvEventPublisherConfig
from cluster.engine.lora_loader import LoadLimits, LoraLoader, ShardSource
from cluster.engine.recording import Recording, RecordingConfig
from cluster.engine.server import EngineServer, RouterConnection
from cluster.engine.status import EngineStatus
from cluster.messages import Detach, Keep, PrefixCacheReset, SchedulerAddress, Status
from cluster.request import Request
from cluster.scheduler.stats import CacheReset

logger = logging.getLogger("topwork.scheduler")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine needs beyond what its ranks do; times in seconds."""

    replica: str
    ranks: SupervisorConfig
    request_timeout: float | None = None  # until a request ends with an error
    loads: LoadLimits = LoadLimits()
    # None: KV events go only to routers that follow them.
    kv_publisher: KvEventPublisherConfig | None = None
    recording: RecordingConfig | None = None  # None: nothing is written down


class Engine:
    """Runs one scheduler and its ranks until it is closed."""

    def __init__(self, config: EngineConfig, launcher: RankLauncher, pool: ShardSource) -> None:
        self._replica = config.replica
        self._status = EngineStatus(config.replica, time.monotonic)
        self._publisher = KvEventPublisher(config.kv_publisher) if config.kv_publisher else None
        self._kv_feed = KvEventFeed(config.ranks.scheduler.base_digest, time.time, self._publisher)
        self._server = EngineServer(self, self._kv_feed)
        self._recording = Recording(config.recording)
        metrics = self._status.metrics
        self._wake = asyncio.Event()
        self._gate = GrammarGate(self._wake.set)
        self._dispatcher = Dispatcher(
            config.request_timeout,
            config.ranks.scheduler.max_waiting,
            self._status,
            self._wake.set,
        )
        self._lora_loader = LoraLoader(
            pool, self._dispatcher, self._gate.holds, self._wake.set, metrics, config.loads
        )
        self._supervisor = Supervisor(
            config.ranks,
            launcher,
            self._recording,
            self._dispatcher,
            self._lora_loader,
            self._kv_feed,
            self._status,
            self._wake,
        )
        self._main: asyncio.Task[None] | None = None

    async def start(self, host: str) -> SchedulerAddress:
        """Listen for routers and begin to bring up the ranks; return the address of the server."""
        if self._publisher is not None:
            self._publisher.open()
        self._kv_feed.clear()
        self._recording.open()
        secret = secrets.token_bytes(32)
        port = await self._server.open(host, secret)
        self._main = asyncio.create_task(self._supervisor.run())
        return SchedulerAddress(self._replica, host, port, secret)

    def on_crash(self, callback: Callable[[], None]) -> None:
        """Call `callback` if the step loop ends by an error of its own: a bug, not a lost rank."""
        assert self._main is not None, "start() comes first"

        def check(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                logger.critical("the scheduler crashed", exc_info=task.exception())
                callback()

        self._main.add_done_callback(check)

    async def wait_until_up(self) -> None:
        """Wait until the ranks are up for the first time.

        Raises:
            Unavailable: if they could not be started, with the reason; they are tried again.
        """
        await self._status.begun.wait()
        if self._status.is_starting:
            raise self._status.unavailable()

    async def drain(self, timeout: float) -> int:
        """Let routers go elsewhere and end what runs; return how many requests are left.

        Requests are taken until the last router has hung up, as one may have been on its way.
        """
        self._server.stop_accepting()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._server.wait_disconnected()
        return self._dispatcher.num_streams + self._gate.num_held

    async def close(self) -> None:
        """End the ranks and close all connections."""
        assert self._main is not None, "start() comes first"
        self._gate.close()
        self._main.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._main
        await self._server.close()
        self._dispatcher.close()
        self._recording.close()
        if self._publisher is not None:
            await self._publisher.close()

    # What routers ask; all on the event loop, between two awaits of the step loop.

    def submit(
        self,
        router: RouterConnection,
        requests: tuple[Request, ...],
        keep: Keep | None,
        wants_times: bool,
    ) -> None:
        """Queue the choices of one prompt, all or none; or answer at once why not."""
        self._gate.submit(
            self._supervisor.executor,
            router,
            requests,
            keep,
            lambda left: self._dispatcher.submit(router, left, keep, wants_times),
        )

    def detach(self, router: RouterConnection, message: Detach) -> None:
        """Keep a call whose reader has gone."""
        self._gate.behind(message.stream_id, lambda: self._dispatcher.detach(router, message))

    def claim(self, router: RouterConnection, call_id: int, stream_id: str, prefix: str) -> None:
        """Give a call that was kept to a reader."""
        self._gate.behind(
            stream_id, lambda: self._dispatcher.claim(router, call_id, stream_id, prefix)
        )

    def look(self, router: RouterConnection, call_id: int, stream_id: str) -> None:
        """Tell what there is of a call that is kept."""
        self._gate.behind(stream_id, lambda: self._dispatcher.look(router, call_id, stream_id))

    def end_kept(
        self, router: RouterConnection, call_id: int, stream_id: str, forgets: bool
    ) -> None:
        """End a call that is kept, whoever reads it."""
        self._gate.behind(
            stream_id, lambda: self._dispatcher.end_kept(router, call_id, stream_id, forgets)
        )

    def abort(self, router: RouterConnection, request_id: str) -> None:
        """Drop a request, unless it has just ended."""
        if not self._gate.abort(router, request_id):
            self._dispatcher.abort(router, request_id)

    def abort_all(self, router: RouterConnection) -> None:
        """Drop everything of a router that has gone."""
        self._gate.abort_all(router, lambda: self._dispatcher.abort_all(router))
        self._dispatcher.abort_all(router)

    def unload(self, router: RouterConnection, call_id: int, adapter: str, force: bool) -> None:
        """Forget an adapter; the answer goes out when nothing of it is left."""
        self._lora_loader.unload(self._supervisor.scheduler, router, call_id, adapter, force)

    def allow(self, adapter: str) -> None:
        """Let requests for an adapter in again whose unload is not complete."""
        self._lora_loader.allow(self._supervisor.scheduler, adapter)

    def keep_pinned(self, adapters: dict[str, int]) -> None:
        """Keep exactly these adapters in their slots, also when the ranks have restarted."""
        self._lora_loader.keep_pinned(self._supervisor.scheduler, adapters)

    def reset_prefix_cache(self, router: RouterConnection, call_id: int) -> None:
        """Forget the cached prefixes that nothing running uses; lost ranks have none."""
        scheduler = self._supervisor.scheduler
        result = CacheReset(0, 0, 0) if scheduler is None else scheduler.reset_prefix_cache()
        self._kv_feed.flush()
        router.send(PrefixCacheReset(call_id, result))

    def status(self, call_id: int) -> Status:
        """Return counts and health as of now."""
        return self._status.snapshot(
            call_id, self._supervisor.scheduler, self._supervisor.executor, self._lora_loader.held
        )
