"""The streams of one engine: which router asked, until when, and what it has been sent.

A stream outlives its ranks. When they are lost it is parked, and goes on in the next scheduler
behind the tokens that its router has: tokens are a function of what came before them, so they are
those that would have come. Requests that arrive meanwhile are parked too.

A stream in whose steps the ranks are lost again and again, with no token of it between, is a
suspect. Suspects go on one at a time with nothing beside them: the ranks that are lost again then
are lost by that one, and it ends, alone.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from cluster.engine.kept_streams import CLAIMED, KeptCall, KeptStreams
from cluster.engine.metrics import RequestTrace, SequenceTimes
from cluster.engine.server import RouterConnection
from cluster.engine.status import EngineStatus
from cluster.errors import ErrorInfo, Overloaded, TopworkError, error_info
from cluster.messages import Claimed, Detach, Events, Keep, UnreadUsage
from cluster.request import Request, TokenEvent, has_part
from cluster.scheduler.scheduler import Scheduler
from cluster.scheduler.update_from_output import EXPIRED, UNLOADED
from cluster.tenancy.usage import NO_USAGE, Usage

logger = logging.getLogger("topwork.scheduler")

MAX_LOSSES = 2  # of ranks in steps of a stream without a token of it between: then it is a suspect
RETRY_AFTER_SECONDS = 5  # about what a restart of the ranks takes


@dataclass(slots=True, eq=False)
class Stream:
    """One request that has not ended."""

    router: RouterConnection | None  # None: nobody reads it, and it is kept
    request: Request  # as it was submitted
    name: str  # what the router calls it
    choices: "list[Stream]"  # of the same prompt that have not ended, itself among them
    token_ids: list[int]  # all that the client has
    times: SequenceTimes
    timer: asyncio.TimerHandle | None = None
    seq_id: int | None = None  # None: parked
    num_losses: int = 0  # of ranks in its steps since its last token
    kept: KeptCall | None = None
    index: int = 0  # of the choice, in a call that is kept
    events: list[TokenEvent] | None = None  # of a call that is kept

    @property
    def continued(self) -> Request:
        """Return the request for the next scheduler."""
        return replace(self.request, output_token_ids=tuple(self.token_ids))


class Dispatcher:
    """Takes requests to the scheduler and its events back, whatever becomes of the ranks."""

    def __init__(
        self,
        timeout: float | None,
        max_parked: int,
        status: EngineStatus,
        wake: Callable[[], None],
    ) -> None:
        self.is_parking = False  # the ranks are lost and expected back
        self._timeout = timeout  # seconds that a request may take; None: as long as it likes
        self._max_parked = max_parked  # requests that may come while the ranks are down
        self._status = status
        self._metrics = status.metrics
        self._wake = wake
        self._scheduler: Scheduler | None = None
        self._streams: dict[int, Stream] = {}  # by sequence
        self._by_router: dict[RouterConnection, dict[str, Stream]] = {}  # and by request id
        self._parked: list[list[Stream]] = []  # choices of one prompt each, in order of arrival
        self._suspect: Stream | None = None  # that runs alone, while all others are parked
        self._kept = KeptStreams(self._drop)
        self._unread: dict[str, Usage] = {}  # by tenant: had by no router, and told to none

    @property
    def num_streams(self) -> int:
        """Requests whose events a router waits for."""
        return len(self._streams) + len(self._all_parked())

    # What routers ask.

    def submit(
        self,
        router: RouterConnection,
        requests: tuple[Request, ...],
        keep: Keep | None = None,
        wants_times: bool = False,
    ) -> None:
        """Queue the choices of one prompt, all or none; or answer at once why not."""
        try:
            if keep is not None:
                self._kept.check_room(keep)
            seq_ids = self._let_in(requests)
        except TopworkError as error:
            router.send(Events(tuple(_failed(r.request_id, error_info(error)) for r in requests)))
            return
        kept = None if keep is None else self._kept.add(keep, requests, router)
        choices: list[Stream] = []
        for index, request in enumerate(requests):
            name = request.request_id
            trace = RequestTrace(request.adapter) if wants_times else None
            times = self._metrics.arrival(trace)
            given = list(request.output_token_ids)
            stream = Stream(router, request, name, choices, given, times)
            if kept is not None:
                stream.kept, stream.events, stream.index = kept, kept.events[index], index
            if self._timeout is not None:
                loop = asyncio.get_running_loop()
                left = self._timeout - request.elapsed
                stream.timer = loop.call_later(left, self._expire, stream)
            self._by_router.setdefault(router, {})[name] = stream
            choices.append(stream)
        if seq_ids is None:
            self._parked.append(choices)
        else:
            self._bind(choices, seq_ids)
        if keep is not None and keep.tells:
            router.send(Events(tuple(TokenEvent(stream.name) for stream in choices)))
        self._tell_unread()
        self._wake()

    def abort(self, router: RouterConnection, request_id: str) -> None:
        """Drop a request, unless it has just ended."""
        stream = self._by_router.get(router, {}).get(request_id)
        if stream is not None:
            self._abort(stream)

    def abort_all(self, router: RouterConnection) -> None:
        """Drop everything of a router that has gone, but for calls that are kept."""
        for stream in tuple(self._by_router.get(router, {}).values()):
            if stream.kept is None:
                self._abort(stream)
            else:
                self._detach(stream.kept)

    def detach(self, router: RouterConnection, message: Detach) -> None:
        """Keep a call whose reader has gone, for as long as was asked.

        Nothing happens if another router reads it now.
        """
        kept = self._kept.get(message.stream_id)
        if kept is None or kept.reader is not router:
            return
        if message.told:
            self._take_back(kept, message.told)
        if kept.has_ended:
            self._tell_unread(router)
        elif message.follows:
            self._kept.unread(kept)
        else:
            self._detach(kept)

    def claim(self, router: RouterConnection, call_id: int, stream_id: str, prefix: str) -> None:
        """Send a call that was kept to a router from now on; whoever read it before does no more.

        Its answer says what there was so far.
        """
        kept = self._kept.get(stream_id)
        if kept is None:
            router.send(Claimed(call_id, prefix))
            return
        claimed = kept.claimed(call_id, prefix)
        kept.reader = router
        for stream in self._of(kept):
            if stream.router is not None:
                stream.router.send(Events((_failed(stream.name, CLAIMED),)))
            self._unlist(stream)
            stream.router, stream.name = router, f"{prefix}/{stream.index}"
            self._by_router.setdefault(router, {})[stream.name] = stream
            kept.take_untold(stream.index, len(stream.token_ids))  # it is told now
        self._kept.read(kept)
        router.send(claimed)
        self._tell_unread(router)

    def look(self, router: RouterConnection, call_id: int, stream_id: str) -> None:
        """Tell what there is of a call that is kept; whoever reads it goes on."""
        kept = self._kept.get(stream_id)
        router.send(Claimed(call_id, "") if kept is None else kept.claimed(call_id, ""))

    def end_kept(
        self, router: RouterConnection, call_id: int, stream_id: str, forgets: bool
    ) -> None:
        """End what runs of a call that is kept, and tell whoever reads it; `look` at the rest."""
        kept = self._kept.get(stream_id)
        if kept is not None:
            self._end(kept)
        self.look(router, call_id, stream_id)
        if kept is not None and forgets:
            self._kept.forget(kept)

    # What the step loop brings.

    def deliver(self, events: Iterable[tuple[int, TokenEvent]]) -> None:
        """Send each router one message with all events of its requests."""
        by_router: dict[RouterConnection, list[TokenEvent]] = {}
        for seq_id, event in events:
            stream = self._streams.get(seq_id)
            if stream is None:
                continue  # aborted while the step ran
            self._tell(stream, event, by_router)
            is_end = event.finish_reason is not None
            if event.token_ids:
                stream.token_ids += event.token_ids
                stream.num_losses = 0
            has_token = bool(event.token_ids)
            if self._metrics.delivered(stream.times, has_token=has_token, is_end=is_end):
                self._tell_times(stream, is_end=is_end)
            if is_end:
                self._forget(stream)
        for router, router_events in by_router.items():
            router.send(Events(tuple(router_events)))
        if self._suspect is not None:
            self._go_on_if_cleared()

    def attach(self, scheduler: Scheduler) -> None:
        """Let all that is parked go on in a new scheduler, and requests in."""
        assert self._scheduler is None, "the ranks of the last one are not lost"
        self._scheduler = scheduler
        self.is_parking = False
        self._go_on()

    def park(self, in_steps: Collection[int], loading: Collection[str]) -> None:
        """Keep all streams for the next scheduler: the ranks are lost.

        Args:
            in_steps: the sequences in the steps that they had not answered.
            loading: the adapters that they were loading.
        """
        self._scheduler, self.is_parking = None, True
        suspect, self._suspect = self._suspect, None
        is_load = suspect is not None and suspect.seq_id not in in_steps
        groups = {id(stream.choices): stream.choices for stream in self._streams.values()}
        for seq_id, stream in self._streams.items():
            stream.num_losses += seq_id in in_steps or stream.request.adapter in loading
            stream.seq_id = None
            self._metrics.parked(stream.times)
        self._streams.clear()
        groups |= {id(group): group for group in self._parked}
        self._parked = list(groups.values())
        if suspect is not None and suspect.num_losses > MAX_LOSSES:
            self._end_culprit(suspect, is_load=is_load)

    def has_parked(self, digest: str) -> bool:
        """Tell whether a stream of an adapter, or of a sum with it, is in no scheduler."""
        return bool(self._parked_of(digest))

    def end_parked(self, digest: str) -> None:
        """End those streams: their adapter is unloaded, and that does not wait for them."""
        self._fail(self._parked_of(digest), UNLOADED)

    def fail_all(self, error: ErrorInfo) -> None:
        """End every request with an error; no more are let in before the next `attach`."""
        self._scheduler, self.is_parking, self._suspect = None, False, None
        self._fail((*self._streams.values(), *self._all_parked()), error)
        self._parked.clear()

    def close(self) -> None:
        """Forget the calls that are kept."""
        self._kept.close()

    # Parts of it.

    def _all_parked(self) -> list[Stream]:
        return [stream for group in self._parked for stream in group if stream.seq_id is None]

    def _parked_of(self, digest: str) -> list[Stream]:
        return [one for one in self._all_parked() if has_part(one.request.adapter, digest)]

    def _let_in(self, requests: tuple[Request, ...]) -> list[int] | None:
        """Return the sequences of requests, None if they must be parked; or raise why not."""
        if self.is_parking or self._suspect is not None:
            num_parked = len(self._all_parked())
            had_begun = any(request.output_token_ids for request in requests)
            if num_parked + len(requests) > self._max_parked and not had_begun:
                message = f"the ranks are being restarted, and {num_parked} requests wait for that"
                raise Overloaded(message, retry_after=RETRY_AFTER_SECONDS)
            return None
        if self._scheduler is None:
            raise self._status.unavailable()
        return self._scheduler.add_all(requests, any(r.output_token_ids for r in requests))

    def _bind(self, streams: Sequence[Stream], seq_ids: Sequence[int]) -> None:
        for stream, seq_id in zip(streams, seq_ids, strict=True):
            stream.seq_id = seq_id
            self._streams[seq_id] = stream
            self._metrics.queued(seq_id, stream.times)

    def _go_on_if_cleared(self) -> None:
        """Let the others go on if the suspect has a token by now, or has ended."""
        suspect = self._suspect
        if suspect is None or (suspect.num_losses and suspect in suspect.choices):
            return
        self._suspect = None
        self._go_on()

    def _go_on(self) -> None:
        """Give parked streams to the scheduler: the first suspect alone, or else all."""
        while self._parked:
            suspects = (one for one in self._all_parked() if one.num_losses >= MAX_LOSSES)
            suspect = next(suspects, None)
            if suspect is None:
                groups, self._parked = self._parked, []
                for group in groups:
                    self._continue([stream for stream in group if stream.seq_id is None])
            elif self._continue([suspect]):
                self._suspect = suspect
                break
        self._wake()

    def _continue(self, streams: list[Stream]) -> bool:
        """Give choices of one prompt to the scheduler; False if they have ended instead."""
        if not streams:
            return False
        assert self._scheduler is not None, "there is one to go on in"
        try:
            requests = tuple(stream.continued for stream in streams)
            self._bind(streams, self._scheduler.add_all(requests, resumes=True))
        except TopworkError as error:  # the new ranks may have less room
            self._fail(streams, error_info(error))
            return False
        return True

    def _end_culprit(self, culprit: Stream, *, is_load: bool) -> None:
        """End the stream by which ranks are lost, and who waits for the adapter that does it."""
        request, culprits = culprit.request, [culprit]
        where = "steps of this request alone"
        if is_load:
            where = f"loads of the adapter {request.adapter}"
            parked = self._all_parked()
            culprits = [one for one in parked if one.request.adapter == request.adapter]
        message = f"the ranks were lost {culprit.num_losses} times in a row in {where}"
        for stream in culprits:
            logger.error("request %s is ended: %s", stream.request.request_id, message)
        self._fail(culprits, ErrorInfo("Internal", message))

    def _expire(self, stream: Stream) -> None:
        """End a request that has taken longer than it may."""
        if stream.seq_id is None:
            self._fail([stream], EXPIRED)
        else:
            assert self._scheduler is not None, "a sequence has a scheduler"
            self.deliver(self._scheduler.expire(stream.seq_id))
        self._wake()

    def _fail(self, streams: Iterable[Stream], error: ErrorInfo) -> None:
        by_router: dict[RouterConnection, list[TokenEvent]] = {}
        for stream in tuple(streams):
            self._tell(stream, _failed(stream.name, error), by_router)
            self._forget(stream)
        for router, router_events in by_router.items():
            router.send(Events(tuple(router_events)))

    def _tell(
        self,
        stream: Stream,
        event: TokenEvent,
        by_router: dict[RouterConnection, list[TokenEvent]],
    ) -> None:
        """Add an event to what a stream's reader is sent, and to what is kept."""
        if stream.events is not None:
            stream.events.append(event)
            if event.request_id != stream.name:  # it has been claimed
                event = replace(event, request_id=stream.name)
        if stream.router is not None:
            by_router.setdefault(stream.router, []).append(event)
            if stream.kept is not None:
                stream.kept.num_told[stream.index] += len(event.token_ids)

    def _tell_times(self, stream: Stream, *, is_end: bool) -> None:
        """Tell a stream's reader how it fares, if it asks for that, before it has the event."""
        if stream.router is None:
            return
        times = self._metrics.request_times(stream.name, stream.times, is_end=is_end)
        if times is not None:
            stream.router.send(times)

    def _of(self, kept: KeptCall) -> list[Stream]:
        """Return the streams of a call that have not ended."""
        everywhere = (*self._streams.values(), *self._all_parked())
        return [stream for stream in everywhere if stream.kept is kept]

    def _detach(self, kept: KeptCall) -> None:
        for stream in self._of(kept):
            self._unlist(stream)
            stream.router = None
        self._kept.unread(kept)

    def _drop(self, kept: KeptCall) -> None:
        """End what runs of a call that nobody has claimed."""
        self._end(kept)

    def _end(self, kept: KeptCall) -> None:
        """End what runs of a call, and tell whoever reads or follows it."""
        for stream in self._of(kept):
            if stream.router is not None:
                end = TokenEvent(stream.name, finish_reason="abort")
                stream.router.send(Events((end,)))
            self._abort(stream)

    def _abort(self, stream: Stream) -> None:
        seq_id = stream.seq_id
        if stream.events is not None:  # to whoever claims it, its tokens say why it has ended
            stream.events.append(TokenEvent(stream.name, finish_reason="abort"))
        self._forget(stream)
        if seq_id is not None:
            assert self._scheduler is not None, "a sequence has a scheduler"
            self._scheduler.abort(seq_id)
        self._go_on_if_cleared()
        self._wake()

    def _forget(self, stream: Stream) -> None:
        stream.choices.remove(stream)
        if stream.kept is not None:
            self._book_unread(stream.kept, stream.index, len(stream.token_ids))
        self._unlist(stream)
        if stream.seq_id is not None:
            self._streams.pop(stream.seq_id, None)
            self._metrics.removed(stream.seq_id)
        if stream.timer is not None:
            stream.timer.cancel()
        if stream.kept is not None and stream.kept.has_ended:
            self._kept.end(stream.kept)

    def _take_back(self, kept: KeptCall, told: tuple[int, ...]) -> None:
        """Let what a call had since a claim count as told to nobody; what has ended is booked."""
        running = {stream.index for stream in self._of(kept)}
        for index, events in enumerate(kept.events):
            kept.num_told[index] = told[index]
            if index not in running:
                self._book_unread(kept, index, sum(len(event.token_ids) for event in events))

    def _book_unread(self, kept: KeptCall, index: int, num_tokens: int) -> None:
        """Have what an answer of so many tokens had that no router has had counted by any."""
        usage = kept.take_untold(index, num_tokens)
        if usage != NO_USAGE:
            tenant = kept.requests[index].tenant
            self._unread[tenant] = self._unread.get(tenant, NO_USAGE).plus(usage)
            self._tell_unread()

    def _tell_unread(self, asking: RouterConnection | None = None) -> None:
        """Tell a router what nobody has counted: the one that asks, or any; else the next one."""
        router = asking or next(iter(self._by_router), None)
        if router is not None and self._unread:
            unread, self._unread = self._unread, {}
            for tenant, usage in unread.items():
                router.send(UnreadUsage(tenant, usage))

    def _unlist(self, stream: Stream) -> None:
        """Take a stream from what its router reads."""
        if stream.router is None:
            return
        of_router = self._by_router[stream.router]
        del of_router[stream.name]
        if not of_router:
            del self._by_router[stream.router]


def _failed(request_id: str, error: ErrorInfo) -> TokenEvent:
    return TokenEvent(request_id, finish_reason="error", error=error)
