"""What a router counts and measures of its own calls.

Owns its counts, the cap on labels of adapters and tenants, and the moments of a call. `exposition`
joins them with those of schedulers and other routers.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import get_args

from cluster.errors import Overloaded, TopworkError
from cluster.histogram import Histogram
from cluster.metrics_hub import RouterCounts
from cluster.request import BASE
from cluster.router.engine_client import LossReason
from cluster.router.metrics.families import Family
from cluster.router.metrics.request_families import ADAPTER_COUNTERS, COUNTERS, HISTOGRAMS
from cluster.router.output_processor import OutputProcessor
from cluster.tenancy.usage import NO_USAGE, Usage

OTHER = "_other"  # the label of all adapters, or tenants, over the cap
FINISHED = ("stop", "length", "abort", "error", "repetition")  # vLLM's; we know no repetition
REASONS = ("scheduler_queue", "router_in_flight", "tenant_share", "limit", "draining")
TASKS = ("replicas", "drain", "metrics", "budgets", "keys")  # that a router runs in the background


class RouterMetrics:
    """The metrics of one router; label values stand in the families' order, without the router."""

    def __init__(self, model: str, max_labels: int) -> None:
        self.num_in_flight = 0  # answers
        self.key_file_loaded: float | None = None  # seconds since 1970; None: there is none
        self._model = model
        self._max_labels = max_labels  # of adapters, and of tenants
        self._usage: dict[str, Usage] = {}  # by tenant
        self._tenant_labels: set[str] = set()
        self._names_by_label: dict[str, set[str]] = {}  # a "+" in a name may make two of one
        self._counts: dict[str, defaultdict[tuple[str, ...], float]] = {
            family.name: defaultdict(float) for family in COUNTERS
        }
        self._histograms = {family.name: Histogram(family.bounds) for family in HISTOGRAMS}
        self._num_entries = 0
        # What does not exist before it is first counted has no increase then: begin with zeros.
        for reason in REASONS:
            self._add("rejections", 0, reason)
        for name in ("client_disconnects", "broken_streams", "api_key_file_errors"):
            self._add(name, 0)
        self._add("request_log_lost_lines", 0)
        for reason in FINISHED:
            self._add("finished_requests", 0, reason)
        for loss in get_args(LossReason):
            self._add("stream_continuations", 0, loss)
        for task in TASKS:
            self._add("background_task_failures", 0, task)

    def counts(self, router: str, *, has_ended: bool = False) -> RouterCounts:
        """Return everything as it is now, for the metrics hub."""
        self._num_entries += 1
        return RouterCounts(
            router=router,
            number=self._num_entries,
            counters={name: tuple(table.items()) for name, table in self._counts.items()},
            histograms={name: one.counts() for name, one in self._histograms.items()},
            adapters={
                label: tuple(sorted(names))
                for label, names in self._names_by_label.items()
                if label != self._model
            },
            num_in_flight=self.num_in_flight,
            usage=dict(self._usage),
            has_ended=has_ended,
            key_file_loaded=self.key_file_loaded,
        )

    def call(
        self, names: tuple[str, ...], num_choices: Sequence[int], arrival: float, tenant: str = ""
    ) -> "CallMetrics":
        """Return the moments of a call with so many answers to each prompt.

        `names` are the base model's or those of the adapters in it; together they have one label.
        """
        return CallMetrics(self, self._label(names), num_choices, arrival, tenant)

    def responded(self, route: str, code: int) -> None:
        """Count an HTTP response."""
        self._add("http_requests", 1, route, str(code))

    def rejected(self, reason: str) -> None:
        """Count a call that a limit kept out."""
        self._add("rejections", 1, reason)

    def disconnected(self) -> None:
        """Count a client that went away."""
        self._add("client_disconnects", 1)

    def broke_off(self) -> None:
        """Count a stream that ended with an error."""
        self._add("broken_streams", 1)

    def continued(self, reason: LossReason, seconds: float | None) -> None:
        """Count an answer that goes on elsewhere, `seconds` after its loss if it had begun."""
        self._add("stream_continuations", 1, reason)
        if seconds is not None:
            self._histograms["stream_interruption_seconds"].observe(seconds)

    def key_file_failed(self) -> None:
        """Count a look at the file of API keys that found it of no use."""
        self._add("api_key_file_errors", 1)

    def log_lines_lost(self, count: int) -> None:
        """Count calls that are missing in the request log."""
        self._add("request_log_lost_lines", count)

    def task_failed(self, task: str) -> None:
        """Count the end of a background task."""
        self._add("background_task_failures", 1, task)

    def first_token(self, label: str, seconds: float) -> None:
        """Note a time to first token."""
        self._histograms["time_to_first_token_seconds"].observe(seconds)
        self._add("first_tokens", 1, self._model, self._kept(label))
        self._add("first_token_wait_seconds", seconds, self._model, self._kept(label))

    def next_token(self, seconds: float) -> None:
        """Note a time between two tokens."""
        self._histograms["inter_token_latency_seconds"].observe(seconds)

    def ended(self, label: str, reason: str) -> None:
        """Count an answer's end."""
        self._add("requests", 1, self._model, self._kept(label), reason)

    def finished(self, reason: str, count: int) -> None:
        """Count the ends of answers, by a word of `FINISHED`."""
        self._add("finished_requests", count, reason)

    def prompted(self, label: str, output: OutputProcessor) -> None:
        """Count the tokens of a prompt; `output` is the first to it."""
        labels = self._model, self._kept(label)
        self._add("prompt_tokens", len(output.request.token_ids), *labels)
        self._add("cached_prompt_tokens", output.num_cached_tokens, *labels)

    def answered(
        self, label: str, output: OutputProcessor, seconds: float, decoding: float
    ) -> None:
        """Count the tokens of an answer, `seconds` after the call, `decoding` after its first."""
        self._add("generation_tokens", output.num_tokens, self._model, self._kept(label))
        self._histograms["e2e_request_latency_seconds"].observe(seconds)
        if output.num_tokens > 1:
            per_token = decoding / (output.num_tokens - 1)
            self._histograms["time_per_output_token_seconds"].observe(per_token)
        request = output.request
        for name, value in (
            ("request_prompt_tokens", len(request.token_ids)),
            (
                "request_prefill_kv_computed_tokens",
                len(request.token_ids) - output.num_cached_tokens,
            ),
            ("request_generation_tokens", output.num_tokens),
            ("request_params_max_tokens", request.max_tokens),
        ):
            self._histograms[name].observe(value)

    def all_answered(self, num_choices: int, num_tokens: int) -> None:
        """Note that a prompt has all its answers, and how long the longest is."""
        self._histograms["request_params_n"].observe(num_choices)
        self._histograms["request_max_num_generation_tokens"].observe(num_tokens)

    def used(self, tenant: str, usage: Usage) -> None:
        """Count what a call of a tenant has used; "" is nobody."""
        if not tenant:
            return
        if tenant not in self._usage:
            self._usage[tenant] = NO_USAGE
            if len(self._usage) <= self._max_labels:
                self._tenant_labels.add(tenant)
        self._usage[tenant] = self._usage[tenant].plus(usage)
        label = tenant if tenant in self._tenant_labels else OTHER
        for name, count in usage._asdict().items():
            self._add(f"tenant_{name}", count, label)

    def forget_adapter(self, adapter: str) -> None:
        """Drop the series of an adapter that is no longer served, and of the sums it is in."""
        labels = {one for one, names in self._names_by_label.items() if adapter in names}
        for label in labels:
            del self._names_by_label[label]
        for family in ADAPTER_COUNTERS:
            table, index = self._counts[family.name], family.labels.index("adapter")
            for values in [values for values in table if values[index] in labels]:
                del table[values]

    def _add(self, name: str, value: float, *labels: str) -> None:
        self._counts[name][labels] += value

    def _label(self, names: tuple[str, ...]) -> str:
        label = "+".join(names)
        if label not in self._names_by_label:
            if len(self._names_by_label) >= self._max_labels:
                return OTHER
            self._names_by_label[label] = set()
        self._names_by_label[label].update(names)
        return label

    def _kept(self, label: str) -> str:
        """Return where to count: a call may end after its adapter was forgotten."""
        return label if label in self._names_by_label else OTHER


class CallMetrics:
    """The moments of one call, which came at `arrival`, in seconds of `time.monotonic`."""

    def __init__(
        self,
        metrics: RouterMetrics,
        label: str,
        num_choices: Sequence[int],
        arrival: float,
        tenant: str,
    ) -> None:
        self._metrics = metrics
        self._tenant = tenant
        self._num_received = 0  # tokens of all answers
        self._label = label
        self._arrival = arrival
        self._num_choices = num_choices  # of each prompt
        self._prompt_of = [prompt for prompt, count in enumerate(num_choices) for _ in range(count)]
        self._num_left = list(num_choices)
        self._longest = [0] * len(num_choices)  # answer that ended, in tokens
        self._first: list[float | None] = [None] * sum(num_choices)
        self._latest: list[float] = [self._arrival] * sum(num_choices)

    def caught_up(self, count: int) -> None:
        """Note tokens that came before this router read the call, and that nobody has counted."""
        self._num_received += count

    def tokens(self, index: int, count: int) -> None:
        """Note that `count` tokens of one answer are here."""
        if not count:
            return
        self._num_received += count
        now = time.monotonic()
        if self._first[index] is None:
            self._first[index] = now
            self._metrics.first_token(self._label, now - self._arrival)
        else:
            self._metrics.next_token((now - self._latest[index]) / count)
        self._latest[index] = now

    @property
    def num_received(self) -> int:
        """Tokens of all answers so far."""
        return self._num_received

    @property
    def first_token(self) -> float | None:
        """When the first token of all answers came; None if there is none."""
        return min((at for at in self._first if at is not None), default=None)

    def first_token_at(self, index: int) -> float | None:
        """Return when an answer's first token came; None if it has none."""
        return self._first[index]

    def is_first_choice(self, index: int) -> bool:
        """Tell whether an answer is the first one to its prompt."""
        return index == 0 or self._prompt_of[index - 1] != self._prompt_of[index]

    def finished(self, index: int, output: OutputProcessor) -> None:
        """Note the end of one output."""
        assert output.finish_reason is not None, "an answer that goes on"
        now = time.monotonic()
        first = self._first[index]
        decoding = 0.0 if first is None else now - first
        self._metrics.ended(self._label, output.finish_reason)
        self._metrics.finished(output.finish_reason, 1)
        prompt = self._prompt_of[index]
        if self.is_first_choice(index):
            self._metrics.prompted(self._label, output)
        self._metrics.answered(self._label, output, now - self._arrival, decoding)
        self._longest[prompt] = max(self._longest[prompt], output.num_tokens)
        self._num_left[prompt] -= 1
        if self._num_left[prompt] == 0:
            self._metrics.all_answered(self._num_choices[prompt], self._longest[prompt])

    def left(self, outputs: Sequence[OutputProcessor], had_begun: Collection[int]) -> None:
        """Count for its tenant what the call has used; answers that had begun were elsewhere."""
        begun = [
            index
            for index, output in enumerate(outputs)
            if index not in had_begun and (output.output_token_ids or output.finish_reason)
        ]
        usage = Usage(
            requests=len(begun),
            generation_tokens=self._num_received,
            adapter_seconds=self._adapter_seconds(outputs),
        )
        for output in (outputs[index] for index in begun if self.is_first_choice(index)):
            cached = output.num_cached_tokens
            usage = usage.plus(Usage(0, len(output.request.token_ids) - cached, cached))
        self._metrics.used(self._tenant, usage)

    def _adapter_seconds(self, outputs: Sequence[OutputProcessor]) -> float:
        if not outputs or outputs[0].request.adapter == BASE:
            return 0.0
        spans = zip(self._first, self._latest, strict=True)
        return sum(latest - first for first, latest in spans if first is not None)

    def continued(self, reason: LossReason, seconds: float | None) -> None:
        """Note that one answer goes on elsewhere, `seconds` after its loss if it had begun."""
        self._metrics.continued(reason, seconds)

    def disconnected(self, *, is_kept: bool) -> None:
        """Note that the client is gone; with `is_kept` its answers go on."""
        self._metrics.disconnected()
        if not is_kept:
            self._metrics.finished("abort", sum(self._num_left))

    def broke_off(self) -> None:
        """Note that the error came after the beginning of a stream."""
        self._metrics.broke_off()

    def failed(self, error: BaseException) -> None:
        """Note that the call ends with an error."""
        if isinstance(error, Overloaded):
            self._metrics.rejected("scheduler_queue")
        self._metrics.finished("error", sum(self._num_left))
        self._metrics.ended(
            self._label, type(error).__name__ if isinstance(error, TopworkError) else "error"
        )


def router_families() -> tuple[Family, ...]:
    """Return what a router counts."""
    return COUNTERS + HISTOGRAMS
