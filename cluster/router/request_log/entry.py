"""What the request log says of one call, as it becomes known on the call's way.

Owns the names of a line's fields, and what is not in it: no key, no prompt, no answer, no salt, no
argument of a tool and no message of an error, which may quote any of them. Texts of prompts and
answers are there only if the server was asked for them. What a caller chooses and is in a line
anyway is cut.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from cluster.errors import TopworkError
from cluster.messages import RequestTimes
from cluster.request import BASE, Request, parts_of
from cluster.router.output_processor import OutputProcessor
from cluster.router.tenancy.principal import Principal

MAX_TEXT = 1024  # characters of what a caller has sent
MAX_CONTENT = 100_000  # characters of a prompt or an answer, where they are asked for
MAX_TIMED = 16  # answers of a call whose times schedulers are asked for
DIGEST_LETTERS = 12
Value = str | int | float | bool | list[str]


@dataclass(slots=True, kw_only=True)
class RequestEntry:
    """One call, from its arrival to its end; belongs to one event loop until it has ended."""

    time: str  # of its arrival, UTC
    arrival: float  # the same in seconds of `time.monotonic`
    router: str
    request_id: str
    method: str
    client: str | None = None  # the address that the connection came from
    forwarded_for: str | None = None  # X-Forwarded-For: what proxies say, the last of them last
    has_content: bool = False  # prompts and answers are asked for
    route: str = ""
    status: int = 0  # HTTP; 0: it ended before there was any
    is_stream: bool = False
    tenant: str | None = None  # None: nobody who is known
    key: str | None = None  # the name of the key
    model: str | None = None
    adapter: str | None = None
    num_choices: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    queue_seconds: float | None = None  # the longest wait of its answers in schedulers
    first_token: float | None = None  # in seconds of `time.monotonic`
    end: float = 0.0  # likewise
    finish_reasons: list[str] = field(default_factory=list)  # each once
    replicas: list[str] = field(default_factory=list)  # each once, in order
    num_resubmitted: int = 0
    error: str | None = None  # its kind
    code: str | None = None  # of the error, as clients see it
    has_disconnected: bool = False
    contents: list[tuple[OutputProcessor, ...]] = field(default_factory=list)  # if asked for
    _num_timed: int = 0
    _num_generating: int = 0
    _on_end: Callable[[], None] | None = None

    def of(self, principal: Principal) -> None:
        """Note who calls."""
        self.tenant, self.key = principal.tenant, principal.key_name

    def failed(self, error: TopworkError) -> None:
        """Note why it failed, without the words that may quote it."""
        self.error, self.code = type(error).__name__, error.code

    # What a generation knows.

    @property
    def wants_times(self) -> bool:
        """Whether schedulers are to tell how answers that are submitted now fare."""
        return self._num_timed < MAX_TIMED

    def resolved(self, names: tuple[str, ...], prompts: Sequence[tuple[Request, ...]]) -> None:
        """Note what answers, and what it is asked: once for each wave of prompts."""
        self.model, self.adapter = "+".join(names), short(prompts[0][0].adapter)
        self.num_choices += sum(map(len, prompts))
        self.num_prompt_tokens += sum(len(choices[0].token_ids) for choices in prompts)

    def entered(self) -> None:
        """Note that answers are being generated, until they are left."""
        self._num_generating += 1

    def submitted(self, replica: str, count: int, *, again: bool) -> None:
        """Note that a scheduler is given answers."""
        self._num_timed += count
        self.num_resubmitted += count if again else 0
        if replica not in self.replicas:
            self.replicas.append(replica)

    def timed(self, times: RequestTimes) -> None:
        """Note how an answer fared in its scheduler."""
        self.queue_seconds = max(times.start, self.queue_seconds or 0.0)

    def left(
        self,
        prompts: Sequence[tuple[OutputProcessor, ...]],
        num_received: int,
        first_token: float | None,
        error: BaseException | None,
    ) -> None:
        """Note what came of answers that nobody waits for any more, because of an error maybe."""
        self.num_generated_tokens += num_received
        for choices in prompts:
            self.num_cached_tokens += choices[0].num_cached_tokens
            for output in choices:
                reason = output.finish_reason
                if reason is not None and reason not in self.finish_reasons:
                    self.finish_reasons.append(reason)
        if first_token is not None:
            self.first_token = min(first_token, self.first_token or first_token)
        if isinstance(error, TopworkError):
            self.failed(error)
        self.cut(error)
        if self.has_content:
            self.contents += prompts
        self._num_generating -= 1
        self._end_if_over()

    def cut(self, error: BaseException | None) -> None:
        """Note that the client has gone, if that is what the error says."""
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self.has_disconnected = True

    # What becomes of it.

    def when_over(self, on_end: Callable[[], None]) -> None:
        """Call `on_end` when nothing of it is generated any more: its HTTP call has ended."""
        self._on_end = on_end
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._on_end is not None and not self._num_generating:
            on_end, self._on_end = self._on_end, None
            on_end()

    def fields(self, decode: Callable[[Sequence[int]], str]) -> dict[str, Value]:
        """Return the line's fields; those that say nothing are left out.

        `decode` makes text of tokens.
        """
        known: dict[str, Value | None] = {
            "time": self.time,
            "router": self.router,
            "request_id": self.request_id,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "stream": self.is_stream,
            "tenant": self.tenant,
            "key": self.key,
            "model": None if self.model is None else self.model[:MAX_TEXT],
            "adapter": self.adapter,
            "choices": self.num_choices or None,
            "seconds": _rounded(self.end - self.arrival),
            "client": self.client,
            "forwarded_for": self.forwarded_for,
            "disconnected": self.has_disconnected or None,
            "error": self.error,
            "code": self.code,
        }
        if self.model is not None:
            known |= {
                "prompt_tokens": self.num_prompt_tokens,
                "cached_tokens": self.num_cached_tokens,
                "generated_tokens": self.num_generated_tokens,
                "queue_seconds": _rounded(self.queue_seconds),
                "ttft_seconds": None
                if self.first_token is None
                else _rounded(self.first_token - self.arrival),
                "finish_reasons": self.finish_reasons or None,
                "replicas": self.replicas or None,
                "attempts": 1 + self.num_resubmitted if self.replicas else None,
            }
        if self.contents:
            known["prompts"] = [
                decode(choices[0].request.token_ids)[:MAX_CONTENT] for choices in self.contents
            ]
            known["answers"] = [
                decode(output.output_token_ids)[:MAX_CONTENT]
                for choices in self.contents
                for output in choices
            ]
        return {name: value for name, value in known.items() if value is not None}


def short(adapter: str) -> str | None:
    """Return an adapter as a line names it: the beginnings of its digests; None: the base model."""
    if adapter == BASE:
        return None
    if ":" not in adapter:
        return adapter[:DIGEST_LETTERS]
    parts = (f"{digest[:DIGEST_LETTERS]}:{weight:g}" for digest, weight in parts_of(adapter))
    return ",".join(parts)[:MAX_TEXT]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


_CURRENT: ContextVar[RequestEntry | None] = ContextVar("topwork_request_entry", default=None)


def current_entry() -> RequestEntry | None:
    """Return the entry of the call that this code runs for; None: it is not logged."""
    return _CURRENT.get()


def set_current_entry(entry: RequestEntry) -> None:
    """Let the code of a call find its entry, in all tasks that it starts from now on."""
    _CURRENT.set(entry)
