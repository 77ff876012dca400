"""The engine's server for routers: a socket server that speaks cluster.messages.

A connection is the lease of its requests: when it closes, they are aborted.
"""

import asyncio
import logging
from typing import Protocol

import msgspec

from cluster.engine.kv_event_feed import KvEventFeed
from cluster.messages import (
    Abort,
    Allow,
    Claim,
    Detach,
    EndKept,
    FollowKvEvents,
    Keep,
    KeepPinned,
    KvEventsTaken,
    Leaving,
    Look,
    ResetPrefixCache,
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
from cluster.request import Request
from worker.transport.channel import BadFrame, Channel, ChannelClosed, start_server, stop_listening

logger = logging.getLogger("topwork.scheduler")

MAX_UNSENT_BYTES = 64 * 1024 * 1024  # a router that lags this far behind is cut off


class RouterConnection:
    """One router, or the adapter pool."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

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

    def submit(
        self,
        router: RouterConnection,
        requests: tuple[Request, ...],
        keep: Keep | None,
        wants_times: bool,
    ) -> None: ...
    def detach(self, router: RouterConnection, message: Detach) -> None: ...
    def claim(
        self, router: RouterConnection, call_id: int, stream_id: str, prefix: str
    ) -> None: ...
    def look(self, router: RouterConnection, call_id: int, stream_id: str) -> None: ...
    def end_kept(
        self, router: RouterConnection, call_id: int, stream_id: str, forgets: bool
    ) -> None: ...
    def abort(self, router: RouterConnection, request_id: str) -> None: ...
    def abort_all(self, router: RouterConnection) -> None: ...
    def unload(self, router: RouterConnection, call_id: int, adapter: str, force: bool) -> None: ...
    def allow(self, adapter: str) -> None: ...
    def keep_pinned(self, adapters: dict[str, int]) -> None: ...
    def reset_prefix_cache(self, router: RouterConnection, call_id: int) -> None: ...
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
        self._server = await start_server(self._accept, host)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def stop_accepting(self) -> None:
        """Accept no more; ask all who are connected to hang up when their requests have ended."""
        assert self._server is not None, "open() comes first"
        stop_listening(self._server)
        for router in self._routers:
            router.send(Leaving())

    async def wait_disconnected(self) -> None:
        """Wait until nobody is connected."""
        await self._disconnected.wait()

    async def close(self) -> None:
        """Stop listening and drop every router."""
        assert self._server is not None, "open() comes first"
        stop_listening(self._server)
        await asyncio.sleep(0)  # until whoever was let in last has its task
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
            case Submit(requests, keep, wants_times):
                self._handler.submit(router, requests, keep, wants_times)
            case Detach():
                self._handler.detach(router, message)
            case Claim(call_id, stream_id, prefix):
                self._handler.claim(router, call_id, stream_id, prefix)
            case Look(call_id, stream_id):
                self._handler.look(router, call_id, stream_id)
            case EndKept(call_id, stream_id, forgets):
                self._handler.end_kept(router, call_id, stream_id, forgets)
            case Abort(request_id):
                self._handler.abort(router, request_id)
            case Unload(call_id, adapter, force):
                self._handler.unload(router, call_id, adapter, force)
            case Allow(adapter):
                self._handler.allow(adapter)
            case KeepPinned(adapters):
                self._handler.keep_pinned(adapters)
            case ResetPrefixCache(call_id):
                self._handler.reset_prefix_cache(router, call_id)
            case StatusCall(call_id):
                router.send(self._handler.status(call_id))
            case FollowKvEvents(call_id):
                self._kv_feed.follow(router, call_id)
            case KvEventsTaken(call_id):
                self._kv_feed.taken(router, call_id)
            case UnfollowKvEvents(call_id):
                self._kv_feed.unfollow(router, call_id)
