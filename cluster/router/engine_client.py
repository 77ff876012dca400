"""One router's connection to one scheduler.

Owns the requests in flight over it and the replies still awaited. When the connection is lost,
everything that waits on it ends with Unavailable and the client stays closed; whoever owns it
opens another.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from cluster.errors import ErrorInfo, Unavailable
from cluster.kv_events import KvEventBatch
from cluster.messages import (
    Abort,
    Allow,
    Events,
    FollowKvEvents,
    KeepPinned,
    KvEvents,
    KvEventsEnded,
    KvEventsTaken,
    Leaving,
    RouterFrame,
    SchedulerAddress,
    SchedulerFrame,
    Status,
    StatusCall,
    Submit,
    UnfollowKvEvents,
    Unload,
    Unloaded,
    decode_scheduler_frame,
    encode,
)
from cluster.request import Request, TokenEvent
from worker.channel import BadFrame, Channel, ChannelClosed


class EventQueue:
    """Where the events of one call's requests arrive; a slow reader finds several at once."""

    def __init__(self) -> None:
        self._events: list[TokenEvent] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, event: TokenEvent) -> None:
        """Add one event."""
        self._events.append(event)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> list[TokenEvent]:
        """Wait for events and return all that are here, in order of arrival."""
        if not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        events, self._events = self._events, []
        return events


class KvFollower(Protocol):
    """Where the batches of one call's KV events arrive."""

    def deliver(self, client: "EngineClient", batch: KvEventBatch) -> None:
        """Take the next batch; `EngineClient.kv_events_taken` asks for more."""
        ...

    def ended(self, client: "EngineClient", error: ErrorInfo) -> None:
        """Learn that the scheduler sends no more."""
        ...

    def lost(self, client: "EngineClient") -> None:
        """Learn that the connection is gone."""
        ...


class EngineClient:
    """The router's end of a connection to a scheduler; belongs to one event loop."""

    def __init__(
        self, address: SchedulerAddress, channel: Channel, on_change: Callable[[], None]
    ) -> None:
        self.address = address
        self.closed = False
        self.is_leaving = False  # it has asked for no more requests
        self.last_status: Status | None = None
        self._channel = channel
        self._on_change = on_change
        self._queues: dict[str, EventQueue] = {}
        self._calls: dict[int, asyncio.Future[Status | Unloaded]] = {}
        self._kv_followers: dict[int, KvFollower] = {}  # by call id
        self._num_calls = 0
        self._num_foreign = 0  # requests of other routers, by its last status
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(
        cls, address: SchedulerAddress, on_change: Callable[[], None]
    ) -> "EngineClient":
        """Open a connection; `on_change` is called when it is to end, and when it has.

        Raises:
            OSError: if nothing listens there.
        """
        channel = await Channel.connect((address.host, address.port), address.secret)
        return cls(address, channel, on_change)

    @property
    def num_in_flight(self) -> int:
        """Requests submitted and not ended."""
        return len(self._queues)

    @property
    def load(self) -> int:
        """Requests that it has, as far as is known here: of other routers, by its last status."""
        return self.num_in_flight + self._num_foreign

    @property
    def is_ready(self) -> bool:
        """Whether its ranks were up by its last status."""
        return self.last_status is not None and self.last_status.ready

    def holds(self, adapter: str) -> bool:
        """Return whether an adapter was in a slot by its last status."""
        status = self.last_status
        return status is not None and any(
            slot.adapter == adapter and not slot.loading for slot in status.scheduler.slots
        )

    def submit(self, requests: tuple[Request, ...], queue: EventQueue) -> None:
        """Send the choices of one prompt; their events go to the queue.

        The last event of each has a finish_reason.

        Raises:
            Unavailable: if the connection is lost.
        """
        for request in requests:
            assert request.request_id not in self._queues, f"{request.request_id} is in use"
        self._send(Submit(requests))
        for request in requests:
            self._queues[request.request_id] = queue

    def abort(self, request_id: str) -> None:
        """Drop a request; nothing happens if it has ended."""
        if self._queues.pop(request_id, None) is not None:
            self._send(Abort(request_id))

    async def unload(self, adapter: str, *, force: bool = False) -> Unloaded:
        """Make the scheduler forget an adapter; wait until it has, `force` ends what runs.

        Raises:
            Unavailable: if the connection is lost.
        """
        reply = await self._call(lambda call_id: Unload(call_id, adapter, force))
        assert isinstance(reply, Unloaded), f"{type(reply).__name__} in reply to Unload"
        return reply

    def allow(self, adapter: str) -> None:
        """Take back an unload that is not complete; nothing happens if the connection is lost."""
        if not self.closed:
            self._send(Allow(adapter))

    def keep_pinned(self, adapters: dict[str, int]) -> None:
        """Make the scheduler keep exactly these in their slots; as `allow` if it is lost."""
        if not self.closed:
            self._send(KeepPinned(adapters))

    async def status(self) -> Status:
        """Ask for the scheduler's counts.

        Raises:
            Unavailable: if the connection is lost.
        """
        reply = await self._call(StatusCall)
        assert isinstance(reply, Status), f"{type(reply).__name__} in reply to StatusCall"
        self.last_status = reply
        num_requests = reply.scheduler.num_running + reply.scheduler.num_waiting
        self._num_foreign = max(0, num_requests - self.num_in_flight)
        return reply

    def follow_kv_events(self, follower: KvFollower) -> int:
        """Ask for the content of the prefix cache and all changes to it; return the call's id.

        Raises:
            Unavailable: if the connection is lost.
        """
        self._num_calls += 1
        self._send(FollowKvEvents(self._num_calls))
        self._kv_followers[self._num_calls] = follower
        return self._num_calls

    def kv_events_taken(self, call_id: int) -> None:
        """Say that one more batch has been used up; nothing happens if the call has ended."""
        if call_id in self._kv_followers:
            self._send(KvEventsTaken(call_id))

    def unfollow_kv_events(self, call_id: int) -> None:
        """Ask for no more batches; nothing happens if the call has ended."""
        if self._kv_followers.pop(call_id, None) is not None:
            self._send(UnfollowKvEvents(call_id))

    def close(self, reason: str) -> None:
        """Close the connection and end everything that waits on it with Unavailable."""
        self._reading.cancel()
        self._lose(reason)

    async def wait_closed(self) -> None:
        """Wait until nothing of a closed client runs any more."""
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _call(self, make: Callable[[int], RouterFrame]) -> Status | Unloaded:
        self._num_calls += 1
        call_id = self._num_calls
        self._send(make(call_id))
        reply: asyncio.Future[Status | Unloaded] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = reply
        try:
            return await reply
        finally:
            self._calls.pop(call_id, None)

    def _send(self, message: RouterFrame) -> None:
        if self.closed:
            raise Unavailable(f"scheduler {self.address.replica} is gone", retry_after=1)
        self._channel.send(encode(message))

    async def _read(self) -> None:
        try:
            while True:
                self._dispatch(decode_scheduler_frame(await self._channel.receive()))
        except ChannelClosed:
            self._lose("its connection closed")
        except (BadFrame, msgspec.DecodeError, OSError) as error:
            self._lose(f"its connection failed: {error}")

    def _dispatch(self, frame: SchedulerFrame) -> None:
        if isinstance(frame, Events):
            for event in frame.events:
                self._deliver(event)
            return
        if isinstance(frame, KvEvents | KvEventsEnded):
            self._deliver_kv_events(frame)
            return
        if isinstance(frame, Leaving):
            self.is_leaving = True
            self._on_change()
            return
        reply = self._calls.get(frame.call_id)
        if reply is not None and not reply.done():
            reply.set_result(frame)

    def _deliver(self, event: TokenEvent) -> None:
        queue = self._queues.get(event.request_id)
        if queue is None:  # aborted here while the event was on its way
            return
        if event.finish_reason is not None:
            del self._queues[event.request_id]
        queue.put(event)

    def _deliver_kv_events(self, frame: KvEvents | KvEventsEnded) -> None:
        follower = self._kv_followers.get(frame.call_id)
        if follower is None:  # unfollowed here while the batch was on its way
            return
        if isinstance(frame, KvEvents):
            follower.deliver(self, frame.batch)
        else:
            del self._kv_followers[frame.call_id]
            follower.ended(self, frame.error)

    def _lose(self, reason: str) -> None:
        if self.closed:
            return
        self.closed = True
        self._channel.close()
        message = f"scheduler {self.address.replica} was lost: {reason}"
        error = ErrorInfo("Unavailable", message, retry_after=1)
        queues, self._queues = self._queues, {}
        for request_id, queue in queues.items():
            queue.put(TokenEvent(request_id, finish_reason="error", error=error))
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(Unavailable(message, retry_after=1))
        followers, self._kv_followers = self._kv_followers, {}
        for follower in followers.values():
            follower.lost(self)
        self._on_change()
