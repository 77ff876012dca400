"""A scheduler without a model, for tests of routers: a socket server that speaks cluster.messages.

What it answers is a script: a function of the request. Owns no pages, no slots, no ranks.
"""

import asyncio
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from msgspec import structs

from cluster.engine.kv_event_feed import KvEventFeed
from cluster.errors import ErrorInfo
from cluster.histogram import Histogram
from cluster.messages import (
    Abort,
    Claim,
    Claimed,
    EndKept,
    EngineCounters,
    Events,
    FollowKvEvents,
    KvEventsTaken,
    Leaving,
    Look,
    PrefixCacheReset,
    RankStatus,
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
    decode_router_frame,
    encode,
)
from cluster.request import FinishReason, Request, TokenEvent
from cluster.router.metrics.scheduler_metrics import HISTOGRAMS
from cluster.scheduler.stats import CacheReset, SchedulerCounters, SchedulerStats, SlotStats
from worker.protocol import TokenLogprobs
from worker.transport.channel import Channel, ChannelClosed

SECRET = b"a secret among fakes"


@dataclass(frozen=True, slots=True)
class Script:
    """What becomes of one request, a token in each step; what it has got elsewhere counts too."""

    tokens: tuple[int, ...] | None = None  # None: drawn from a hash of prompt and position
    error: ErrorInfo | None = None  # instead of the token after `tokens`, or of the first one
    dies_after: int | None = None  # tokens, then the connection breaks
    pauses_after: int | None = None  # tokens, then none before the scheduler's `resume`
    forgets_end: bool = False  # the last token comes without a finish_reason, and nothing after it
    is_silent: bool = False  # no token ever
    num_cached_tokens: int = 0
    logprobs: tuple[float, ...] = ()  # of `tokens`; (): all the same


def _scored(request: Request) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of a prompt: of token t it is -t, and its rank is t + 1."""
    num_best = request.sampling.prompt_logprobs
    if num_best is None:
        return ()
    return tuple(
        (
            -float(token_id),
            tuple((token_id + i, -float(token_id + i)) for i in range(num_best)),
            token_id + 1,
        )
        for token_id in request.token_ids[1:]
    )


def _pooled(request: Request) -> TokenEvent:
    """Return a prompt as three numbers: its length, its first token and its last."""
    numbers = len(request.token_ids), request.token_ids[0], request.token_ids[-1]
    return TokenEvent(request.request_id, finish_reason="stop", pooled=struct.pack("<3f", *numbers))


def hashed_token(request: Request, position: int, vocab_size: int) -> int:
    """Return the token at a position of the answer: the same for the same prompt, always.

    It is never one that stops, and the seed, which a router may have drawn, has no part in it:
    an unscripted answer ends where its request says and nowhere else.
    """
    key = repr((request.adapter, request.token_ids, position)).encode()
    drawn = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
    tokens = [token for token in range(vocab_size) if token not in request.stop_token_ids]
    return tokens[drawn % len(tokens)]


async def _stop_listening(server: asyncio.Server) -> None:
    asyncio.get_running_loop().remove_reader(server.sockets[0])
    for _ in range(5):  # a connection that the loop is about to make would be lost with it
        await asyncio.sleep(0)
    server.close()


class _Running:
    def __init__(self, request: Request, script: Script, wants_times: bool = False) -> None:
        self.request = request
        self.script = script
        self.wants_times = wants_times
        self.arrival = time.monotonic()
        self.first_token: float | None = None
        self.num_tokens = len(request.output_token_ids)  # of the answer
        self.has_ended = False


def _times(sequence: _Running, event: TokenEvent) -> RequestTimes | None:
    """Return what is told before the first token and before the end, if it is asked for."""
    is_end = event.finish_reason is not None
    if not sequence.wants_times or not (is_end or sequence.first_token is None):
        return None
    now = time.monotonic() - sequence.arrival
    if event.token_ids and sequence.first_token is None:
        sequence.first_token = now
    return RequestTimes(
        event.request_id,
        start=0.0,
        first_token=sequence.first_token,
        end=now if is_end else None,
        num_prefill_steps=1,
        num_decode_steps=sequence.num_tokens - 1,
    )


class _Line:
    """A connection as the feed of KV events sees it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, message: SchedulerFrame) -> None:
        self._channel.send(encode(message))


class FakeScheduler:
    """Serves any number of routers until closed."""

    def __init__(
        self,
        script: Callable[[Request], Script] = lambda _: Script(),
        *,
        replica: str = "0",
        vocab_size: int = 256,
        step_seconds: float = 0.0,
        max_requests: int = 10_000,  # at once, over one connection
    ) -> None:
        self.replica = replica
        self.reason = ""  # why it is unhealthy; "" if it is not
        self.is_starting = False  # its ranks have not been up yet
        self.is_hung = False  # answers nothing at all
        self.answers_calls = True  # else it only sends tokens
        self.submitted: list[Request] = []
        self.submits: list[tuple[Request, ...]] = []  # the same as they came
        self.num_timed = 0  # requests whose times a router wants
        self.aborted: list[str] = []
        self.unloaded: list[str] = []
        self.num_resets = 0  # of its prefix cache
        self.reset_result = CacheReset(3, 2, 1)
        self.kv_feed = KvEventFeed(
            "fake base", time.time
        )  # a test plays the cache that it observes
        self.kv_feed.clear()
        self._script = script
        self._vocab_size = vocab_size
        self._step_seconds = step_seconds
        self._max_requests = max_requests
        self._is_resumed = False
        self._step = 0
        self._histograms = {one.name: Histogram(one.bounds).counts() for one in HISTOGRAMS}
        self._server: asyncio.Server | None = None
        self._channels: set[Channel] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()

    async def start(self) -> SchedulerAddress:
        """Listen on a free port of this host and return where."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return SchedulerAddress(self.replica, "127.0.0.1", port, SECRET)

    async def close(self) -> None:
        """Stop listening and break all connections, as a killed process would."""
        server, self._server = self._server, None
        if server is not None:
            await _stop_listening(server)
        for channel in list(self._channels):
            channel.close()
        await asyncio.gather(*self._tasks)

    @property
    def num_routers(self) -> int:
        """Connections that are open."""
        return len(self._channels)

    def leave(self) -> None:
        """Let nobody else in, and ask for no more requests."""
        server, self._server = self._server, None
        assert server is not None, "it does not listen"
        self._tasks.add(asyncio.create_task(_stop_listening(server)))
        for channel in self._channels:
            channel.send(encode(Leaving()))

    def resume(self) -> None:
        """Let scripts that pause go on, now and from now on."""
        self._is_resumed = True

    async def wait_until(self, holds: Callable[["FakeScheduler"], bool]) -> None:
        """Wait until something holds of the messages received; at most five seconds."""
        async with asyncio.timeout(5.0), self._changed:
            await self._changed.wait_for(lambda: holds(self))

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.close())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = await Channel.accepted(reader, writer, SECRET)
        if channel is None or self._server is None:
            return
        self._channels.add(channel)
        running: dict[str, _Running] = {}
        line = _Line(channel)
        stepping = asyncio.create_task(self._run(channel, running))
        try:
            while True:
                frame = decode_router_frame(await channel.receive())
                self._take(frame, channel, running)
                self._take_kv_call(frame, line)
                async with self._changed:
                    self._changed.notify_all()
        except ChannelClosed:
            channel.close()
        finally:
            stepping.cancel()
            await asyncio.gather(stepping, return_exceptions=True)
            self._channels.discard(channel)
            self.kv_feed.forget(line)
            async with self._changed:
                self._changed.notify_all()

    def _take(self, frame: RouterFrame, channel: Channel, running: dict[str, _Running]) -> None:
        if isinstance(frame, Submit):
            self._submit(frame, channel, running)
        elif isinstance(frame, Abort):
            self.aborted.append(frame.request_id)
            running.pop(frame.request_id, None)
        elif isinstance(frame, Unload) and not self.is_hung:
            self.unloaded.append(frame.adapter)
            channel.send(encode(Unloaded(frame.call_id, 0, ())))
        elif isinstance(frame, ResetPrefixCache) and not self.is_hung:
            self.num_resets += 1
            channel.send(encode(PrefixCacheReset(frame.call_id, self.reset_result)))
        elif isinstance(frame, Claim | Look | EndKept) and not self.is_hung:
            channel.send(encode(Claimed(frame.call_id, "")))  # it keeps nothing
        elif isinstance(frame, StatusCall) and self.answers_calls and not self.is_hung:
            channel.send(encode(self._status(frame.call_id, running)))

    def _take_kv_call(self, frame: RouterFrame, line: _Line) -> None:
        if isinstance(frame, FollowKvEvents):
            self.kv_feed.follow(line, frame.call_id)
        elif isinstance(frame, KvEventsTaken):
            self.kv_feed.taken(line, frame.call_id)
        elif isinstance(frame, UnfollowKvEvents):
            self.kv_feed.unfollow(line, frame.call_id)

    def _submit(self, submit: Submit, channel: Channel, running: dict[str, _Running]) -> None:
        requests = submit.requests
        self.num_timed += len(requests) if submit.wants_times else 0
        self.submitted += requests
        self.submits.append(requests)
        is_resumed = any(request.output_token_ids for request in requests)
        if any(len(one.output_token_ids) >= one.max_tokens for one in requests):
            error = ErrorInfo("InvalidRequest", "nothing is left to generate")
        elif not is_resumed and len(running) + len(requests) > self._max_requests:
            error = ErrorInfo("Overloaded", f"{len(running)} requests run already", retry_after=1)
        else:
            running.update(
                (r.request_id, _Running(r, self._script(r), submit.wants_times)) for r in requests
            )
            return
        events = (TokenEvent(r.request_id, finish_reason="error", error=error) for r in requests)
        channel.send(encode(Events(tuple(events))))

    async def _run(self, channel: Channel, running: dict[str, _Running]) -> None:
        while True:
            events = []
            for request_id, sequence in list(running.items()):
                script = sequence.script
                is_paused = script.pauses_after == sequence.num_tokens and not self._is_resumed
                if script.is_silent or is_paused or self.is_hung or sequence.has_ended:
                    continue
                if script.dies_after == sequence.num_tokens:
                    channel.close()
                    return
                event = self._next_event(sequence)
                times = _times(sequence, event)
                if times is not None:
                    channel.send(encode(times))
                forgets = event.finish_reason is not None and script.forgets_end
                events.append(structs.replace(event, finish_reason=None) if forgets else event)
                if event.finish_reason is not None:
                    sequence.has_ended = True
                    if not script.forgets_end:
                        del running[request_id]
            if events:
                self._step += 1
                channel.send(encode(Events(tuple(events))))
            await asyncio.sleep(self._step_seconds if events else 0.001)

    def _next_event(self, sequence: _Running) -> TokenEvent:
        request, script, position = sequence.request, sequence.script, sequence.num_tokens
        num_scripted = None if script.tokens is None else len(script.tokens)
        if script.error is not None and position == (num_scripted or 0):
            return TokenEvent(request.request_id, finish_reason="error", error=script.error)
        if request.sampling.pooling:
            return _pooled(request)
        if script.tokens is None:
            token_id = hashed_token(request, position, self._vocab_size)
        else:
            token_id = script.tokens[position]
        sequence.num_tokens += 1
        finish_reason: FinishReason | None = None
        if token_id in request.stop_token_ids:
            finish_reason = "stop"
        elif script.error is None and sequence.num_tokens in (num_scripted, request.max_tokens):
            finish_reason = "length"
        num_top = request.sampling.num_logprobs
        logprob = script.logprobs[position] if script.logprobs else -0.5
        return TokenEvent(
            request_id=request.request_id,
            token_ids=(token_id,),
            logprobs=() if num_top is None else (logprob,),
            top_logprobs=(((token_id, logprob), (0, logprob - 1))[:num_top],) if num_top else (),
            num_cached_tokens=script.num_cached_tokens if position == 0 else 0,
            finish_reason=finish_reason,
            prompt_logprobs=_scored(request) if position == 0 else (),
        )

    def _status(self, call_id: int, running: dict[str, _Running]) -> Status:
        adapters = sorted({sequence.request.adapter for sequence in running.values()} - {"base"})
        slots = tuple(SlotStats(slot, name, False, 1) for slot, name in enumerate(adapters))
        return Status(
            call_id=call_id,
            replica=self.replica,
            ready=not self.reason,
            healthy=not self.reason,
            reason=self.reason,
            starting=self.is_starting,
            # All different, so that a test sees when one is shown under another's name.
            scheduler=SchedulerStats(
                step=self._step,
                num_running=len(running),
                free_pages=100,
                total_pages=100,
                num_slots=4,
                slots=slots,
                free_host_pages=1,
                cached_host_pages=2,
                total_host_pages=3,
                longest_slot_wait=8,
                slot_wait_bound=9,
                counters=SchedulerCounters(
                    prompt_tokens=sum(len(request.token_ids) for request in self.submitted),
                    saved_pages=4,
                    restored_pages=5,
                    evicted_host_pages=6,
                    forked_sequences=7,
                    late_slots=10,
                ),
            ),
            engine=EngineCounters(steps_ahead=11, grammar_masks=12, late_grammar_masks=13),
            ranks=(RankStatus(0, 1, True, self._step, 0.0, "cpu", 1, 1),),
            histograms=self._histograms,
        )
