"""What is noted of one call while it is answered, to be spans when it has ended.

Owns the words: GenAI's semantic conventions, vLLM's `gen_ai.latency.*` and, where those have none,
`topwork.*`. No prompt, no answer and no stop string is among the values. Without a tracer there is
no trace, and nothing here costs more than the look for one.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from cluster.messages import RequestTimes
from cluster.request import BASE, Request
from cluster.router.output_processor import OutputProcessor

MAX_ANSWERS = 16  # of a call that have spans of their own; all are counted
MAX_LENGTH = 256  # characters of a text from a caller
PROVIDER = "topwork"
Value = str | bool | int | float | Sequence[str]
# Fields of a body, where it has them and they are set.
REQUEST_ATTRIBUTES = {
    "model": "gen_ai.request.model",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "stream": "gen_ai.request.stream",
}


@dataclass(slots=True)
class Phase:
    """A part of a call or of an answer; moments in seconds of `time.monotonic`."""

    name: str
    start: float
    end: float
    attributes: dict[str, Value] = field(default_factory=dict)
    error: str = ""  # the kind of it; "": it went well
    parts: "list[Phase]" = field(default_factory=list)  # within it


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at one moment."""

    name: str
    at: float
    attributes: Mapping[str, Value]


class CallTrace:
    """One call, from its arrival to its end; belongs to one event loop."""

    def __init__(self, operation: str, arrival: float) -> None:
        self.operation = operation
        self.arrival = arrival
        self.attributes: dict[str, Value] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
        }
        self.events: list[Event] = []
        self.error = ""
        # Clocks are set now and then: what a moment is called is decided for a call as a whole.
        self._offset = time.time() - time.monotonic()
        self._phases: dict[str, Phase] = {}  # before the answers, by name
        self._answers: list[Phase] = []
        self._open: dict[int, Phase] = {}  # answers that a scheduler has
        self._num_submitted = 0
        self._times: list[RequestTimes] = []  # of answers that ended, as far as they are known
        self._finish_reasons: list[str] = []
        self._usage = [0, 0, 0]  # tokens of prompts, of answers, and found in the prefix cache
        self._first_token: float | None = None
        self._num_generating = 0
        self._on_end: Callable[[], None] | None = None

    @property
    def name(self) -> str:
        """What the call is called: `chat MODEL`."""
        return f"{self.operation} {self.attributes.get('gen_ai.request.model', '')}".rstrip()

    def at(self, moment: float) -> int:
        """Return a moment of `time.monotonic` in nanoseconds since 1970."""
        return int((moment + self._offset) * 1e9)

    @property
    def phases(self) -> list[Phase]:
        """All parts of it that have ended."""
        return [*self._phases.values(), *self._answers]

    # What the API knows.

    def requested(self, body: object) -> None:
        """Note what a body asks for."""
        for name, attribute in REQUEST_ATTRIBUTES.items():
            value = getattr(body, name, None)
            if value is not None:
                self.attributes[attribute] = _sendable(value)

    def resolved(self, names: tuple[str, ...], prompts: Sequence[tuple[Request, ...]]) -> None:
        """Note what answers, and to how many prompts."""
        first = prompts[0][0]
        model = "+".join(names)
        self.attributes.setdefault("gen_ai.request.model", model)
        self.attributes["gen_ai.response.model"] = model
        self.attributes["gen_ai.request.id"] = _sendable(first.request_id.rpartition("-")[0])
        if len(prompts[0]) > 1:
            self.attributes["gen_ai.request.choice.count"] = len(prompts[0])
        if first.adapter != BASE:
            self.attributes["topwork.adapter.name"] = model
            self.attributes["topwork.adapter.digest"] = first.adapter

    def phase(self, name: str, start: float, end: float, error: str) -> None:
        """Note a part of the preparation; parts of one name are one, of several prompts."""
        phase = self._phases.setdefault(name, Phase(name, start, end))
        phase.end, phase.error = max(phase.end, end), phase.error or error
        count = phase.attributes.get("topwork.count", 0)
        assert isinstance(count, int)
        phase.attributes["topwork.count"] = count + 1

    def when_over(self, on_end: Callable[[], None]) -> None:
        """Call `on_end` now that the response has ended, or when what goes on behind it has."""
        if self._num_generating:
            self._on_end = on_end
        else:
            on_end()

    # What a generation knows.

    def entered(self) -> None:
        """Note that answers are being generated, until they are left."""
        self._num_generating += 1

    @property
    def wants_times(self) -> bool:
        """Whether answers that are submitted now will have spans."""
        return self._num_submitted < MAX_ANSWERS

    def submitted(self, index: int, request: Request, replica: str) -> None:
        """Note that a scheduler is given a request, maybe behind what another one has computed."""
        self._num_submitted += 1
        if self._num_submitted > MAX_ANSWERS:
            return
        now = time.monotonic()
        attributes: dict[str, Value] = {
            "topwork.replica": replica,
            "topwork.answer.index": index,
            "gen_ai.usage.input_tokens": len(request.token_ids),
        }
        if request.output_token_ids:
            attributes["topwork.output_tokens_before"] = len(request.output_token_ids)
        self._open[index] = Phase("scheduler.request", now, now, attributes)

    def lost(self, index: int, reason: str, times: RequestTimes | None) -> None:
        """Note that a scheduler has lost or refused a request; maybe it goes on in another one."""
        answer = self._open.pop(index, None)
        now = time.monotonic()
        replica = "" if answer is None else answer.attributes["topwork.replica"]
        self.events.append(
            Event("topwork.scheduler_lost", now, {
                "topwork.answer.index": index,
                "topwork.replica": replica,
                "topwork.reason": reason,
            })
        )  # fmt: skip
        if answer is not None:
            self._close(answer, now, times, reason)

    def resubmitted(self, index: int, replica: str) -> None:
        """Note that a request goes on in a scheduler."""
        attributes: dict[str, Value] = {
            "topwork.answer.index": index,
            "topwork.replica": replica,
        }
        self.events.append(Event("topwork.resubmitted", time.monotonic(), attributes))

    def finished(
        self,
        index: int,
        output: OutputProcessor,
        *,
        is_first_choice: bool,
        first_token: float | None,
        times: RequestTimes | None,
    ) -> None:
        """Note the end of an answer, whose first token came at a moment."""
        reason = output.finish_reason
        assert reason is not None, "an answer that goes on"
        num_prompt_tokens = len(output.request.token_ids) if is_first_choice else 0
        num_cached_tokens = output.num_cached_tokens if is_first_choice else 0
        self._usage[0] += num_prompt_tokens
        self._usage[1] += output.num_tokens
        self._usage[2] += num_cached_tokens
        self._finish_reasons.append(reason)
        if first_token is not None:
            self._first_token = min(first_token, self._first_token or first_token)
        answer = self._open.pop(index, None)
        if answer is None:
            return
        answer.attributes["gen_ai.usage.output_tokens"] = output.num_tokens
        answer.attributes["gen_ai.usage.cache_read.input_tokens"] = output.num_cached_tokens
        answer.attributes["gen_ai.response.finish_reasons"] = [reason]
        if times is not None:
            self._times.append(times)
        self._close(answer, time.monotonic(), times, "")

    def left(self, error: BaseException | None) -> None:
        """Note that nobody reads on, because of an error, the client's end, or a stop."""
        kind = "" if error is None else _kind(error)
        self.error = self.error or kind
        for answer in self._open.values():
            self._close(answer, time.monotonic(), None, kind)
        self._open.clear()
        self._num_generating -= 1
        if self._on_end is not None and not self._num_generating:
            self._on_end()

    def ended(self, now: float) -> None:
        """Put together what is known when all is over."""
        if not self._finish_reasons:
            return
        num_prompt, num_output, num_cached = self._usage
        found: dict[str, Value] = {
            "gen_ai.response.finish_reasons": self._finish_reasons,
            "gen_ai.usage.input_tokens": num_prompt,
            "gen_ai.usage.output_tokens": num_output,
            "gen_ai.usage.cache_read.input_tokens": num_cached,
            "gen_ai.latency.e2e": now - self.arrival,
        }
        self.attributes |= found
        if self._first_token is not None:
            self.attributes["gen_ai.latency.time_to_first_token"] = self._first_token - self.arrival
        if len(self._finish_reasons) == len(self._times) == 1:
            self.attributes |= latencies(self._times[0])

    def _close(self, answer: Phase, end: float, times: RequestTimes | None, error: str) -> None:
        answer.end, answer.error = end, error
        if times is not None:
            answer.attributes |= latencies(times)
            answer.attributes["topwork.preemptions"] = times.num_preemptions
            answer.attributes["topwork.recoveries"] = times.num_recoveries
            answer.parts = parts_of(times, answer.start, end)
        self._answers.append(answer)


def latencies(times: RequestTimes) -> dict[str, Value]:
    """Return a request's times under vLLM's names."""
    first = times.end if times.first_token is None else times.first_token
    found: dict[str, Value] = {"gen_ai.latency.time_in_queue": times.start}
    if first is not None:
        found["gen_ai.latency.time_in_model_prefill"] = first - times.start
    if times.end is not None and first is not None:
        found["gen_ai.latency.time_in_model_decode"] = times.end - first
        found["gen_ai.latency.time_in_model_inference"] = times.end - times.start
        seconds = times.prefill_rank_seconds + times.decode_rank_seconds
        found["gen_ai.latency.time_in_model_execute"] = seconds
    return found


def parts_of(times: RequestTimes, start: float, end: float) -> list[Phase]:
    """Return a request's way through a scheduler and its ranks, between two moments of the router.

    The scheduler counts from when the request came, which was after it was sent: no part begins or
    ends after it really did.
    """

    def at(seconds: float) -> float:
        return min(start + seconds, end)

    queue = Phase("scheduler.queue", start, at(times.start))
    if times.load_start is not None and times.load_end is not None:
        load = Phase("scheduler.adapter_load", at(times.load_start), at(times.load_end))
        load.end = min(load.end, queue.end)
        queue.parts.append(load)
    first = times.end if times.first_token is None else times.first_token
    prefill = Phase("ranks.prefill", queue.end, end if first is None else at(first))
    prefill.attributes["topwork.steps"] = times.num_prefill_steps
    prefill.attributes["topwork.rank_seconds"] = times.prefill_rank_seconds
    if times.first_token is None:
        return [queue, prefill]
    decode = Phase("ranks.decode", prefill.end, end if times.end is None else at(times.end))
    if times.end is not None:
        decode.attributes["topwork.steps"] = times.num_decode_steps
        decode.attributes["topwork.rank_seconds"] = times.decode_rank_seconds
    return [queue, prefill, decode]


def _sendable(value: Value) -> Value:
    """Return what a caller has given as OTLP can carry it: names of sane length, 64-bit numbers."""
    if isinstance(value, str):
        return value[:MAX_LENGTH]
    is_number = isinstance(value, int) and not -(2**63) <= value < 2**63
    return str(value)[:MAX_LENGTH] if is_number else value


def _kind(error: BaseException) -> str:
    is_client = isinstance(error, asyncio.CancelledError | GeneratorExit)
    return "cancelled" if is_client else type(error).__name__


_CURRENT: ContextVar[CallTrace | None] = ContextVar("topwork_call_trace", default=None)


def current_trace() -> CallTrace | None:
    """Return the trace of the call that this code runs for; None if it has none."""
    return _CURRENT.get()


def set_current_trace(trace: CallTrace) -> None:
    """Let the code of a call find its trace, in all tasks that it starts from now on."""
    _CURRENT.set(trace)


def note_response_id(response_id: str) -> None:
    """Note what a response is called, if its call has a trace."""
    trace = _CURRENT.get()
    if trace is not None:
        trace.attributes["gen_ai.response.id"] = response_id


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Note how long a block takes, if the call has a trace."""
    trace = _CURRENT.get()
    if trace is None:
        yield
        return
    start, error = time.monotonic(), ""
    try:
        yield
    except BaseException as reason:
        error = _kind(reason)
        raise
    finally:
        trace.phase(name, start, time.monotonic(), error)
