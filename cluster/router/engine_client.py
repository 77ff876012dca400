"""One router's connection to one scheduler.

Owns the requests in flight over it and the replies still awaited. When the connection is lost,
everything that waits on it ends with Unavailable and the client stays closed; whoever owns it
opens another. A stream that ends so can go on elsewhere, behind the tokens that came before.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

import msgspec

from cluster.errors import ErrorInfo, Unavailable
from cluster.kv_events import KvEventBatch
from cluster.messages import (
    Abort,
    Allow,
    Claim,
    Claimed,
    Detach,
    EndKept,
    Events,
    FollowKvEvents,
    Keep,
    KeepPinned,
    KvEvents,
    KvEventsEnded,
    KvEventsTaken,
    Leaving,
    Look,
    PrefixCacheReset,
    RequestTimes,
    ResetPrefixCache,
    RouterFrame,
    SchedulerAddress,
    SchedulerFrame,
    Status,
    StatusCall,
    Submit,
    UnfollowKvEvents,
    Unload,
    Unloaded,
    UnreadUsage,
    decode_scheduler_frame,
    encode,
)
from cluster.request import Request, TokenEvent
from cluster.router.event_queue import EventQueue
from cluster.scheduler.stats import CacheReset
from cluster.tenancy.usage import Usage
from worker.transport.channel import BadFrame, Channel, ChannelClosed

OnUsage = Callable[[str, Usage], None]  # whose, and how much
Reply = Claimed | PrefixCacheReset | Status | Unloaded

# Why a stream had to go on elsewhere: the connection broke, the scheduler was silent for too long,
# answered that it has no ranks, or is to end.
LossReason = Literal["died", "hung", "unavailable", "leaving"]


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
        self,
        address: SchedulerAddress,
        channel: Channel,
        on_change: Callable[[], None],
        on_usage: OnUsage | None = None,
    ) -> None:
        self.address = address
        self.closed = False
        self.is_leaving = False  # it has asked for no more requests
        self.is_refusing = False  # it has answered Unavailable, and not been ready since
        self.last_status: Status | None = None
        self.num_frames = 0  # received: signs of life
        self._is_hung = False
        self._channel = channel
        self._on_change = on_change
        self._on_usage = on_usage
        self._queues: dict[str, EventQueue] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._kv_followers: dict[int, KvFollower] = {}  # by call id
        self._claims: dict[str, EventQueue] = {}  # that are not answered, by prefix
        self._num_calls = 0
        self._num_foreign = 0  # requests of other routers, by its last status
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(
        cls,
        address: SchedulerAddress,
        on_change: Callable[[], None],
        on_usage: OnUsage | None = None,
    ) -> "EngineClient":
        """Open a connection; `on_change` is called when it is to end, has, or `is_ready` changes.

        `on_usage` is told what a tenant's calls had that no router has counted; only routers that
        submit requests hear of such.

        Raises:
            OSError: if nothing listens there.
        """
        channel = await Channel.connect((address.host, address.port), address.secret)
        return cls(address, channel, on_change, on_usage)

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
        """Whether its ranks are up, by its last status and what it has answered since."""
        return self.last_status is not None and self.last_status.ready and not self.is_refusing

    @property
    def is_recovering(self) -> bool:
        """Whether it has lost its ranks and keeps requests until they are back."""
        status = self.last_status
        is_down = status is not None and not status.ready and not status.starting
        return is_down and not self.is_refusing

    @property
    def loss_reason(self) -> LossReason:
        """Why its streams go on elsewhere, when they do."""
        if self._is_hung:
            return "hung"
        if self.is_leaving:
            return "leaving"
        return "died" if self.closed else "unavailable"

    def holds(self, adapter: str) -> bool:
        """Return whether an adapter was in a slot by its last status."""
        status = self.last_status
        return status is not None and any(
            slot.adapter == adapter and not slot.loading for slot in status.scheduler.slots
        )

    def submit(
        self,
        requests: tuple[Request, ...],
        queue: EventQueue,
        keep: Keep | None = None,
        wants_times: bool = False,
    ) -> None:
        """Send the choices of one prompt; their events go to the queue, and their times if wanted.

        The last event of each has a finish_reason. With `keep` they outlive this connection.

        Raises:
            Unavailable: if the connection is lost.
        """
        for request in requests:
            assert request.request_id not in self._queues, f"{request.request_id} is in use"
        self._send(Submit(requests, keep, wants_times))
        for request in requests:
            self._queues[request.request_id] = queue

    def abort(self, request_id: str) -> None:
        """Drop a request; nothing happens if it has ended."""
        if self._queues.pop(request_id, None) is not None:
            self._send(Abort(request_id))

    def detach(
        self, stream_id: str, request_ids: Iterable[str], told: tuple[int, ...] = ()
    ) -> None:
        """Leave a call that is kept to its next reader; nothing happens if the connection is lost.

        No more events of it come here. `told` takes a claim back, as `Detach` says.
        """
        for request_id in request_ids:
            self._queues.pop(request_id, None)
        if not self.closed:
            self._send(Detach(stream_id, told=told))

    def follow(self, stream_id: str) -> None:
        """Say that a call that is kept has no reader; its events go on to come here."""
        if not self.closed:
            self._send(Detach(stream_id, follows=True))

    async def claim(self, stream_id: str, prefix: str, queue: EventQueue) -> Claimed:
        """Ask for a call that is kept; what follows of choice I goes to the queue, as PREFIX/I.

        Raises:
            Unavailable: if the connection is lost.
        """
        self._claims[prefix] = queue
        try:
            reply = await self._call(lambda call_id: Claim(call_id, stream_id, prefix))
        finally:
            del self._claims[prefix]
        assert isinstance(reply, Claimed), f"{type(reply).__name__} in reply to Claim"
        return reply

    async def look(self, stream_id: str) -> Claimed:
        """Ask what there is of a call that is kept; its reader keeps it.

        Raises:
            Unavailable: if the connection is lost.
        """
        reply = await self._call(lambda call_id: Look(call_id, stream_id))
        assert isinstance(reply, Claimed), f"{type(reply).__name__} in reply to Look"
        return reply

    async def end_kept(self, stream_id: str, *, forgets: bool) -> Claimed:
        """End what runs of a call that is kept; with `forgets` nothing of it is kept; see `look`.

        Raises:
            Unavailable: if the connection is lost.
        """
        reply = await self._call(lambda call_id: EndKept(call_id, stream_id, forgets))
        assert isinstance(reply, Claimed), f"{type(reply).__name__} in reply to EndKept"
        return reply

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

    async def reset_prefix_cache(self) -> CacheReset:
        """Make the scheduler forget all cached prefixes that no running sequence uses.

        Raises:
            Unavailable: if the connection is lost.
        """
        reply = await self._call(ResetPrefixCache)
        assert isinstance(reply, PrefixCacheReset), f"{type(reply).__name__} in reply to a reset"
        return reply.result

    async def status(self) -> Status:
        """Ask for the scheduler's counts.

        Raises:
            Unavailable: if the connection is lost.
        """
        reply = await self._call(StatusCall)
        assert isinstance(reply, Status), f"{type(reply).__name__} in reply to StatusCall"
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

    def hand_over(self) -> None:
        """Drop all requests, whose streams are to go on elsewhere: they end with Unavailable."""
        queues, self._queues = self._queues, {}
        for request_id in queues:
            self._send(Abort(request_id))
        reason = f"scheduler {self.address.replica} leaves"
        _end(queues, ErrorInfo("Unavailable", reason, retry_after=1))

    def close(self, reason: str, *, is_hung: bool = False) -> None:
        """Close the connection and end everything that waits on it with Unavailable.

        Nothing happens if it is closed: why it was lost first stays the reason.
        """
        if self.closed:
            return
        self._reading.cancel()
        self._is_hung = is_hung
        self._lose(reason)

    async def wait_closed(self) -> None:
        """Wait until nothing of a closed client runs any more."""
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _call(self, make: Callable[[int], RouterFrame]) -> Reply:
        self._num_calls += 1
        call_id = self._num_calls
        self._send(make(call_id))
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
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
                frame = decode_scheduler_frame(await self._channel.receive())
                self.num_frames += 1
                self._dispatch(frame)
        except ChannelClosed:
            self._lose("its connection closed")
        except (BadFrame, msgspec.DecodeError, OSError) as error:
            self._lose(f"its connection failed: {error}")

    def _dispatch(self, frame: SchedulerFrame) -> None:
        if isinstance(frame, Events):
            for event in frame.events:
                self._deliver(event)
        elif isinstance(frame, KvEvents | KvEventsEnded):
            self._deliver_kv_events(frame)
        elif isinstance(frame, RequestTimes):
            queue = self._queues.get(frame.request_id)
            if queue is not None:
                queue.times[frame.request_id] = frame
        elif isinstance(frame, UnreadUsage):
            if self._on_usage is not None:
                self._on_usage(frame.tenant, frame.usage)
        elif isinstance(frame, Leaving):
            self.is_leaving = True
            self._on_change()
        else:
            if isinstance(frame, Status):
                self._note_status(frame)
            if isinstance(frame, Claimed):
                self._note_claimed(frame)
            reply = self._calls.get(frame.call_id)
            if reply is not None and not reply.done():
                reply.set_result(frame)

    def _deliver(self, event: TokenEvent) -> None:
        queue = self._queues.get(event.request_id)
        if queue is None:  # aborted here while the event was on its way
            return
        if event.finish_reason is not None:
            del self._queues[event.request_id]
            if event.error is not None and event.error.name == "Unavailable":
                self.is_refusing = True
        queue.put(event)

    def _note_claimed(self, claimed: Claimed) -> None:
        """Have somewhere for the events that follow, which may be here already."""
        queue = self._claims.get(claimed.prefix)
        if queue is None:
            return  # whoever asked has gone; the scheduler keeps it
        for index, events in enumerate(claimed.events):
            if not (events and events[-1].finish_reason is not None):
                self._queues[f"{claimed.prefix}/{index}"] = queue

    def _note_status(self, status: Status) -> None:
        was_ready = self.is_ready
        self.last_status = status
        num_requests = status.scheduler.num_running + status.scheduler.num_waiting
        self._num_foreign = max(0, num_requests - self.num_in_flight)
        if status.ready:
            self.is_refusing = False
        if self.is_ready != was_ready:
            self._on_change()

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
        _end(queues, error)
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(Unavailable(message, retry_after=1))
        followers, self._kv_followers = self._kv_followers, {}
        for follower in followers.values():
            follower.lost(self)
        self._on_change()


def _end(queues: dict[str, EventQueue], error: ErrorInfo) -> None:
    for request_id, queue in queues.items():
        queue.put(TokenEvent(request_id, finish_reason="error", error=error))
