"""The answers of one call while they are generated, whatever becomes of their schedulers.

An answer whose scheduler is lost goes on in another one, or in the same when it is back, behind
the tokens that have come: tokens are a function of what came before them, so they are those that
would have come. Each request is aborted exactly once if it has not ended when the call is left,
whether by a stop string, an error or a client that went away.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from types import TracebackType

from msgspec.structs import replace

from cluster.errors import Internal, Overloaded, TopworkError, Unavailable, error_from
from cluster.messages import Claimed, Keep
from cluster.request import Request, TokenEvent
from cluster.router.config import RouterConfig
from cluster.router.engine_client import EngineClient, LossReason
from cluster.router.event_queue import EventQueue
from cluster.router.metrics.request_metrics import CallMetrics
from cluster.router.output_processor import CompletionOutput, OutputProcessor, by_token
from cluster.router.replica_set import ReplicaSet
from cluster.router.request_log.entry import RequestEntry
from cluster.router.tenancy.admission import Admission, num_used
from cluster.router.tracing.call_trace import CallTrace


@dataclass(slots=True, eq=False)
class Interruption:
    """Choices of one prompt that a scheduler has lost or refused, until one has a token again."""

    error: TopworkError  # the last one
    deadline: float | None = None  # of the loop's clock; None: refused, so elsewhere or not at all
    waiting: list[int] = field(default_factory=list)  # indexes of those that no scheduler has
    avoided: dict[EngineClient, float] = field(default_factory=dict)  # until when


@dataclass(frozen=True, slots=True)
class ClaimedCall:
    """A call that was kept: what there is of it, and where the rest comes from."""

    claimed: Claimed
    client: EngineClient
    prefix: str  # of its request ids from here on
    queue: EventQueue

    def release(self, stream_id: str) -> None:
        """Leave it to its next reader."""
        names = (f"{self.prefix}/{index}" for index in range(len(self.claimed.requests)))
        self.client.detach(stream_id, names, self.claimed.told)


class Generation:
    """A context: on entry all requests are submitted, on exit none is left running."""

    def __init__(
        self,
        prompts: Sequence[tuple[OutputProcessor, ...]],
        replicas: ReplicaSet,
        config: RouterConfig,
        metrics: CallMetrics,
        admit: Callable[[int], Callable[[], None]],
        keep: Keep | None = None,
        is_by_token: bool = False,
        trace: CallTrace | None = None,
        admission: Admission | None = None,
        log_entry: RequestEntry | None = None,
        read_on: Callable[["Generation"], None] | None = None,
    ) -> None:
        self.prompts = prompts  # the choices of each
        self.processors = tuple(processor for choices in prompts for processor in choices)
        self._replicas = replicas
        self._config = config
        self._metrics = metrics
        self._admit = admit  # counts requests in; returns what counts them out
        self._release: Callable[[], None] | None = None
        self._keep = keep  # of a call with one prompt that outlives its reader
        self._is_by_token = (
            is_by_token  # how deltas are cut depends on tokens only, not on their arrival
        )
        self._trace = trace
        self._admission = admission  # None: nothing is counted for it, or it has been already
        self._log_entry = log_entry
        self._read_on = read_on  # goes on with a call that is kept when its client has gone
        self._has_no_reader = False
        self._num_counted = 0  # tokens of a claimed call that others have counted
        self.is_let_in = False  # a scheduler has said that it runs, or will
        self._claim: ClaimedCall | None = None
        self._had_begun: set[int] = set()  # of a claimed call: those with tokens that came before
        self._queue = EventQueue()
        self._entered_at = 0.0  # on the loop's clock
        self._prompt_of = [number for number, choices in enumerate(prompts) for _ in choices]
        self._clients: dict[int, EngineClient] = {}  # by index of the running requests
        self._index_by_id: dict[str, int] = {}  # of the running requests, as they were last sent
        self._num_resubmitted = 0
        self._interruptions: dict[int, Interruption] = {}  # by prompt
        self._losses: dict[int, tuple[LossReason, float]] = {}  # by index, when on the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._error: TopworkError | None = None

    def __enter__(self) -> "Generation":
        try:
            self._release = self._admit(len(self.processors))
        except TopworkError:
            if self._claim is not None and self._keep is not None:
                self._claim.release(self._keep.stream_id)
            raise
        if self._admission is not None:
            self._admission.entered()
        self._entered_at = asyncio.get_running_loop().time()
        if self._trace is not None:
            self._trace.entered()
        if self._log_entry is not None:
            self._log_entry.entered()
        if self._claim is not None:
            self._take_over(self._claim)
            return self
        try:
            index = 0
            for choices in self.prompts:
                self._begin(range(index, index + len(choices)), choices)
                index += len(choices)
        except TopworkError as error:
            self._metrics.failed(error)
            self._leave(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave(error)

    def leave(self, error: BaseException | None, *, for_good: bool = False) -> None:
        """Do what the end of the context does, for whoever goes on with it beyond a block.

        A call that is kept goes on when its client has gone, unless it is left `for_good`.
        """
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            if not self._has_no_reader:
                self._metrics.disconnected(is_kept=self._keep is not None)
            if self._keep is not None and self.is_running and self._error is None:
                if self._read_on is not None and not for_good:
                    self._follow(self._keep, error)
                    self._read_on(self)
                    return
                self._detach(self._keep)
        elif error is not None:
            self._metrics.failed(error)
        self._leave(error)

    @property
    def is_running(self) -> bool:
        """Whether there is more to receive."""
        return bool(self._clients or self._interruptions) or self._error is not None

    async def receive(self) -> list[tuple[int, CompletionOutput]]:
        """Wait for events; return (index of the request, delta) in order of arrival, maybe none.

        Raises:
            TopworkError: what a scheduler reports for any of the requests, after all the deltas
                that came before it have been returned. That it cannot be reached or has no ranks
                is reported only when nobody has gone on with the request for the time that the
                router's configuration gives.
        """
        deltas: list[tuple[int, CompletionOutput]] = []
        if self._error is None:
            for event in await self._queue.get():
                index = self._index_by_id.get(event.request_id)
                if index is None:  # ended by a stop string before this event
                    continue
                if event.finish_reason == "error":
                    self._lose(index, event)
                    if self._error is not None:
                        break
                    continue
                self.is_let_in = True
                for part in by_token(event) if self._is_by_token else (event,):
                    delta = self._process(index, part)
                    if delta is not None:
                        deltas.append((index, delta))
                    if self.processors[index].finish_reason is not None:
                        break
            if self._interruptions:
                self._go_on()
        if self._error is not None and not deltas:
            raise self._error
        return deltas

    @property
    def stream_id(self) -> str | None:
        """The id by which the call can be read on; None: it ends with its reader."""
        return None if self._keep is None else self._keep.stream_id

    def claimed(self, call: ClaimedCall) -> "Generation":
        """Read a call that another router, or this one, had begun; return this generation.

        The processors have had all events so far.
        """
        self._claim, self._queue = call, call.queue
        return self

    def broke_off(self) -> None:
        """Note that a stream ended with an error after it had begun."""
        self._metrics.broke_off()

    def _begin(self, indexes: range, choices: Sequence[OutputProcessor]) -> None:
        """Submit the choices of a prompt, or let them wait for a scheduler that is expected."""
        requests = tuple(processor.request for processor in choices)
        client = self._replicas.choose(requests[0])
        deadline = self._replicas.expected_until
        if client is None and deadline > self._entered_at:
            error = Unavailable("no scheduler is up", retry_after=self._config.retry_after)
            prompt = self._prompt_of[indexes[0]]
            self._interruptions[prompt] = Interruption(error, deadline, list(indexes))
            self._queue.wake()
            return
        self._submit(client or self._replicas.choose_any(requests[0]), indexes, requests)

    def _process(self, index: int, event: TokenEvent) -> CompletionOutput | None:
        if not event.token_ids and event.finish_reason is None:
            return None  # it only says that the request has been let in
        processor = self.processors[index]
        if self._losses or self._interruptions:
            self._resumed(index)
        if self._admission is not None and not processor.output_token_ids:
            self._admission.began()
        delta = processor.process(event)
        self._metrics.tokens(index, len(event.token_ids))
        if processor.finish_reason is not None:
            client = self._clients.pop(index)
            del self._index_by_id[event.request_id]
            client.abort(event.request_id)  # where a stop string ended it
            self._metrics.finished(index, processor)
            times = self._queue.times.pop(event.request_id, None)
            if self._log_entry is not None and times is not None:
                self._log_entry.timed(times)
            if self._trace is not None:
                self._trace.finished(
                    index,
                    processor,
                    is_first_choice=self._metrics.is_first_choice(index),
                    first_token=self._metrics.first_token_at(index),
                    times=times,
                )
        return delta

    # What happens when schedulers are lost.

    def _lose(self, index: int, event: TokenEvent) -> None:
        """Take in that a request ended with an error: it waits to be submitted again, or fails."""
        client = self._clients.pop(index)
        del self._index_by_id[event.request_id]
        prompt, now = self._prompt_of[index], asyncio.get_running_loop().time()
        interruption = self._interruptions.get(prompt)
        error = (
            Internal("the scheduler gave no reason for the failure of the request")
            if event.error is None
            else error_from(event.error)
        )
        # What was let in once is let in again, if not at once.
        is_full = isinstance(error, Overloaded) and index in self._losses
        is_late = interruption is not None and (interruption.deadline or inf) <= now
        if is_late or not (isinstance(error, Unavailable) or is_full):
            self._error = error
            return
        if interruption is None:
            interruption = self._interruptions[prompt] = Interruption(error)
        interruption.error = error
        interruption.waiting.append(index)
        if self._trace is not None:
            times = self._queue.times.pop(event.request_id, None)
            self._trace.lost(index, client.loss_reason, times)
        self._losses.setdefault(index, (client.loss_reason, now))
        is_lost = client.closed or client.is_leaving
        has_begun = any(processor.output_token_ids for processor in self.processors)
        if interruption.deadline is None and (is_lost or has_begun):
            interruption.deadline = now + self._config.recovery_timeout
        if interruption.deadline is None:
            interruption.avoided[client] = inf
        elif not is_lost:
            interruption.avoided[client] = now + self._config.retry_after

    def _go_on(self) -> None:
        """Submit again what waits for that, as far as there is a scheduler and time is left."""
        now = asyncio.get_running_loop().time()
        moments: list[float] = []
        for interruption in self._interruptions.values():
            if not interruption.waiting or self._resubmit(interruption, now):
                continue
            if interruption.deadline is None or interruption.deadline <= now:
                self._error = interruption.error
                break
            moments.append(interruption.deadline)
            moments += (until for until in interruption.avoided.values() if until > now)
        self._stop_waiting()
        if moments and self._error is None:
            self._replicas.add_listener(self._queue.wake)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(min(moments), self._queue.wake)

    def _resubmit(self, interruption: Interruption, now: float) -> bool:
        """Give the choices of a prompt to a scheduler; False if there is none."""
        indexes = sorted(interruption.waiting)  # the first one computes the prompt for the others
        avoided = [client for client, until in interruption.avoided.items() if until > now]
        client = self._replicas.choose(self.processors[indexes[0]].request, avoided)
        if client is None:
            return False
        requests = tuple(self._continued(index) for index in indexes)
        self._submit(client, indexes, requests, again=True)
        if self._trace is not None:
            for index in indexes:
                self._trace.resubmitted(index, client.address.replica)
        interruption.waiting.clear()
        return True

    def _continued(self, index: int) -> Request:
        """Return a request as it goes on, under an id of its own: late events have the old one."""
        self._num_resubmitted += 1
        processor = self.processors[index]
        return replace(
            processor.request,
            request_id=f"{processor.request.request_id}.{self._num_resubmitted}",
            output_token_ids=tuple(processor.output_token_ids),
            elapsed=asyncio.get_running_loop().time() - self._entered_at,
        )

    def _resumed(self, index: int) -> None:
        """Note that a request that may have been lost has a token."""
        if index in self._losses:
            reason, lost_at = self._losses.pop(index)
            seconds = asyncio.get_running_loop().time() - lost_at
            has_begun = bool(self.processors[index].output_token_ids)
            self._metrics.continued(reason, seconds if has_begun else None)
        interruption = self._interruptions.get(self._prompt_of[index])
        if interruption is not None and not interruption.waiting:
            del self._interruptions[self._prompt_of[index]]

    def _submit(
        self,
        client: EngineClient,
        indexes: Iterable[int],
        requests: tuple[Request, ...],
        *,
        again: bool = False,
    ) -> None:
        is_whole = len(requests) == len(self.processors)  # what has ended would be missed later
        observers = (self._trace, self._log_entry)
        wants_times = any(one is not None and one.wants_times for one in observers)
        client.submit(requests, self._queue, self._keep if is_whole else None, wants_times)
        if self._keep is not None and self._has_no_reader:
            client.follow(self._keep.stream_id)
        if self._log_entry is not None:
            self._log_entry.submitted(client.address.replica, len(requests), again=again)
        for index, request in zip(indexes, requests, strict=True):
            self._clients[index] = client
            self._index_by_id[request.request_id] = index
            if self._trace is not None:
                self._trace.submitted(index, request, client.address.replica)

    def _take_over(self, call: ClaimedCall) -> None:
        claimed = call.claimed
        counts = zip(self.processors, claimed.events, claimed.told, strict=True)
        for index, (processor, events, told) in enumerate(counts):
            if told or processor.finish_reason is not None:
                self._had_begun.add(index)
            self._metrics.caught_up(sum(len(event.token_ids) for event in events) - told)
            if processor.finish_reason is None:
                self._clients[index] = call.client
                self._index_by_id[f"{call.prefix}/{index}"] = index

        if any(claimed.told):
            self._num_counted = len(self.prompts[0][0].request.token_ids) + sum(claimed.told)

    def _follow(self, keep: Keep, error: BaseException) -> None:
        """Tell schedulers, which end it in time, that nobody reads the call any more."""
        self._has_no_reader = True
        if self._log_entry is not None:
            self._log_entry.cut(error)
        for client in dict.fromkeys(self._clients.values()):
            client.follow(keep.stream_id)

    def _detach(self, keep: Keep) -> None:
        """Leave the call to its next reader."""
        if self._admission is not None and self._clients:
            self._admission.settle(None)
        for client in {*self._clients.values()}:
            client.detach(keep.stream_id, self._index_by_id)
        self._clients.clear()
        self._index_by_id.clear()

    def _tell_log(self, entry: RequestEntry, error: BaseException | None) -> None:
        for times in self._queue.times.values():  # of answers that were broken off
            entry.timed(times)
        metrics = self._metrics
        entry.left(self.prompts, metrics.num_received, metrics.first_token, error)

    def _stop_waiting(self) -> None:
        self._replicas.remove_listener(self._queue.wake)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _leave(self, error: BaseException | None) -> None:
        self._stop_waiting()
        for request_id, index in self._index_by_id.items():
            self._clients[index].abort(request_id)
        if self._log_entry is not None:
            self._tell_log(self._log_entry, error)
        self._clients.clear()
        self._index_by_id.clear()
        if self._trace is not None:
            self._trace.left(error)
        self._metrics.left(self.processors, self._had_begun)
        if self._admission is not None:
            self._admission.settle(num_used(self.prompts) - self._num_counted)
        assert self._release is not None, "left without being entered"
        self._release()
