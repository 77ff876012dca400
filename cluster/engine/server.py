"""The engine's server for routers: connections, and the way of events back over them.

A socket server that speaks cluster.messages. A connection is the lease of its requests: when it
closes, they are aborted. Each router gets one message per step with all the news of its requests;
deadlines are timers here.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from cluster.engine.kv_event_feed import KvEventFeed
from cluster.engine.metrics import EngineMetrics
from cluster.errors import ErrorInfo
from cluster.messages import (
    Abort,
    Allow,
    Events,
    FollowKvEvents,
    KeepPinned,
    KvEventsTaken,
    Leaving,
    RouterFrame,
    SchedulerFrame,
    Status,
    StatusCall,
    Submit,
    UnfollowKvEvents,
    Unload,
    decode_router_frame,
    encode,
)
from cluster.request import Request, TokenEvent
from worker.channel import BadFrame, Channel, ChannelClosed

logger = logging.getLogger("topwork.scheduler")

MAX_UNSENT_BYTES = 64 * 1024 * 1024  # a router that lags this far behind is cut off


class RouterConnection:
    """One router: its channel and the sequences it has in flight, by request id."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.sequences: dict[str, int] = {}

    def send(self, message: SchedulerFrame) -> None:
        """Queue a message; a router that does not read is disconnected, never waited for."""
        if self._channel.unsent_bytes > MAX_UNSENT_BYTES:
            logger.error("a router does not read its events; closing its connection")
            self._channel.close()
            return
        self._channel.send(encode(message))

    async def receive(self) -> RouterFrame:
        """Return the router's next message."""
        return decode_router_frame(await self._channel.receive())

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


class FrameHandler(Protocol):
    """What the frames of a connection ask for; the engine."""

    def submit(self, router: RouterConnection, requests: tuple[Request, ...]) -> None: ...
    def abort(self, router: RouterConnection, request_id: str) -> None: ...
    def abort_all(self, router: RouterConnection) -> None: ...
    def unload(self, router: RouterConnection, call_id: int, adapter: str, force: bool) -> None: ...
    def allow(self, adapter: str) -> None: ...
    def keep_pinned(self, adapters: dict[str, int]) -> None: ...
    def status(self, call_id: int) -> Status: ...


class EngineServer:
    """Accepts connections and hands their messages to the engine, or to the feed of KV events."""

    def __init__(self, handler: FrameHandler, kv_feed: KvEventFeed) -> None:
        self._handler = handler
        self._kv_feed = kv_feed
        self._server: asyncio.Server | None = None
        self._secret = b""
        self._tasks: set[asyncio.Task[None]] = set()  # one for each connection
        self._routers: dict[RouterConnection, None] = {}  # in order of arrival
        self._disconnected = asyncio.Event()
        self._disconnected.set()

    async def open(self, host: str, secret: bytes) -> int:
        """Listen on a free port of `host` and return it."""
        self._secret = secret
        self._server = await asyncio.start_server(self._accept, host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def stop_accepting(self) -> None:
        """Accept no more; ask all who are connected to hang up when their requests have ended."""
        assert self._server is not None, "open() comes first"
        self._server.close()
        for router in self._routers:
            router.send(Leaving())

    async def wait_disconnected(self) -> None:
        """Wait until nobody is connected."""
        await self._disconnected.wait()

    async def close(self) -> None:
        """Stop listening and drop every router."""
        assert self._server is not None, "open() comes first"
        self._server.close()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.close())  # also if it was cancelled unbegun

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = await Channel.accepted(reader, writer, self._secret)
        if channel is None:
            logger.warning("refused a connection that does not know the secret")
            return
        router = RouterConnection(channel)
        self._routers[router] = None
        self._disconnected.clear()
        try:
            while True:
                self._dispatch(router, await router.receive())
        except ChannelClosed:
            pass  # the router ended or died: its requests end with it
        except (BadFrame, msgspec.DecodeError) as error:
            logger.error("a router sent a bad frame: %s", error)
        finally:
            self._handler.abort_all(router)
            self._kv_feed.forget(router)
            router.close()
            del self._routers[router]
            if not self._routers:
                self._disconnected.set()

    def _dispatch(self, router: RouterConnection, message: RouterFrame) -> None:
        match message:
            case Submit(requests):
                self._handler.submit(router, requests)
            case Abort(request_id):
                self._handler.abort(router, request_id)
            case Unload(call_id, adapter, force):
                self._handler.unload(router, call_id, adapter, force)
            case Allow(adapter):
                self._handler.allow(adapter)
            case KeepPinned(adapters):
                self._handler.keep_pinned(adapters)
            case StatusCall(call_id):
                router.send(self._handler.status(call_id))
            case FollowKvEvents(call_id):
                self._kv_feed.follow(router, call_id)
            case KvEventsTaken(call_id):
                self._kv_feed.taken(router, call_id)
            case UnfollowKvEvents(call_id):
                self._kv_feed.unfollow(router, call_id)


@dataclass(slots=True)
class _Stream:
    router: RouterConnection
    request_id: str
    timer: asyncio.TimerHandle | None


class Dispatcher:
    """The stream of every sequence that has not ended: which router asked, and until when."""

    def __init__(
        self, timeout: float | None, expire: Callable[[int], None], metrics: EngineMetrics
    ) -> None:
        self._timeout = timeout  # seconds that a request may take; None: as long as it likes
        self._expire = expire
        self._metrics = metrics
        self._streams: dict[int, _Stream] = {}  # by sequence

    @property
    def num_streams(self) -> int:
        """Sequences whose events a router waits for."""
        return len(self._streams)

    def add(
        self, router: RouterConnection, seq_ids: Sequence[int], requests: Sequence[Request]
    ) -> None:
        """Send the events of these sequences to this router from now on."""
        self._metrics.arrived(seq_ids)
        for seq_id, request in zip(seq_ids, requests, strict=True):
            timer = None
            if self._timeout is not None:
                loop = asyncio.get_running_loop()
                timer = loop.call_later(self._timeout, self._expire, seq_id)
            self._streams[seq_id] = _Stream(router, request.request_id, timer)
            router.sequences[request.request_id] = seq_id

    def remove(self, router: RouterConnection, request_id: str) -> int | None:
        """Forget a request and return its sequence; None if it has ended already."""
        seq_id = router.sequences.get(request_id)
        if seq_id is not None:
            self._forget(seq_id)
        return seq_id

    def deliver(self, events: Iterable[tuple[int, TokenEvent]]) -> None:
        """Send each router one message with all events of its requests."""
        by_router: dict[RouterConnection, list[TokenEvent]] = {}
        for seq_id, event in events:
            stream = self._streams.get(seq_id)
            if stream is None:
                continue  # aborted while the step ran
            by_router.setdefault(stream.router, []).append(event)
            is_end = event.finish_reason is not None
            self._metrics.delivered(seq_id, has_token=bool(event.token_ids), is_end=is_end)
            if is_end:
                self._forget(seq_id)
        for router, router_events in by_router.items():
            router.send(Events(tuple(router_events)))

    def fail_all(self, error: ErrorInfo) -> None:
        """End every request with an error."""
        self.deliver(
            [
                (seq_id, TokenEvent(stream.request_id, finish_reason="error", error=error))
                for seq_id, stream in self._streams.items()
            ]
        )

    def _forget(self, seq_id: int) -> None:
        stream = self._streams.pop(seq_id)
        del stream.router.sequences[stream.request_id]
        self._metrics.removed(seq_id)
        if stream.timer is not None:
            stream.timer.cancel()
