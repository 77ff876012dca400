"""What a router counts and measures of its own calls.

Owns a registry of its own, the cap on adapter labels and the moments of a call. Knows nothing of
the schedulers' counts, which `exposition` adds.
"""

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter

from cluster.errors import Overloaded, TopworkError
from cluster.router.answer import Answer
from cluster.router.histogram import Histogram

OTHER = "_other"  # the adapter label of all adapters over the cap
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80,
)  # fmt: skip
E2E_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5,
    10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip


class RouterMetrics:
    """The metrics of one router."""

    def __init__(self, model: str, max_adapter_labels: int) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._max_adapter_labels = max_adapter_labels
        self._names_by_label: dict[str, set[str]] = {}  # a "+" in a name may make two of one
        by_adapter = ["model", "adapter"]
        self._requests = self._counter(
            "requests", "Answers that ended, by reason.", [*by_adapter, "finish_reason"]
        )
        self._prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens, once for all answers to a prompt.", by_adapter
        )
        self._generation_tokens = self._counter(
            "generation_tokens", "Tokens of ended answers.", by_adapter
        )
        self._cached_tokens = self._counter(
            "cached_prompt_tokens", "Prompt tokens found in the prefix cache.", by_adapter
        )
        self._rejections = self._counter(
            "rejections", "Calls refused because a limit is reached.", ["reason"]
        )
        self._disconnects = self._counter(
            "client_disconnects", "Calls whose client went away before the end.", []
        )
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From a call's arrival to its first token.", TTFT_BUCKETS
        )
        self._itl = self._histogram(
            "inter_token_latency_seconds", "From one token to the next.", ITL_BUCKETS
        )
        self._tpot = self._histogram(
            "time_per_output_token_seconds", "An answer's mean time per token.", ITL_BUCKETS
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From a call's arrival to its end.", E2E_BUCKETS
        )

    def call(self, names: tuple[str, ...], num_choices: Sequence[int]) -> "CallMetrics":
        """Return the moments of a call that arrives now, with so many answers to each prompt.

        `names` are the base model's or those of the adapters in it; together they have one label.
        """
        return CallMetrics(self, self._label(names), num_choices)

    def rejected(self, reason: str) -> None:
        """Count a call that a limit kept out."""
        self._rejections.labels(reason).inc()

    def disconnected(self) -> None:
        """Count a client that went away."""
        self._disconnects.inc()

    def first_token(self, seconds: float) -> None:
        """Note a time to first token."""
        self._ttft.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """Note a time between two tokens."""
        self._itl.observe(seconds)

    def ended(self, label: str, reason: str) -> None:
        """Count an answer's end."""
        self._requests.labels(self._model, self._kept(label), reason).inc()

    def prompted(self, label: str, answer: Answer) -> None:
        """Count the tokens of a prompt; `answer` is the first to it."""
        label = self._kept(label)
        self._prompt_tokens.labels(self._model, label).inc(len(answer.request.token_ids))
        self._cached_tokens.labels(self._model, label).inc(answer.num_cached_tokens)

    def answered(self, label: str, answer: Answer, seconds: float, decoding: float) -> None:
        """Count the tokens of an answer, `seconds` after the call, `decoding` after its first."""
        self._generation_tokens.labels(self._model, self._kept(label)).inc(answer.num_tokens)
        self._e2e.observe(seconds)
        if answer.num_tokens > 1:
            self._tpot.observe(decoding / (answer.num_tokens - 1))

    def forget_adapter(self, adapter: str) -> None:
        """Drop the series of an adapter that is no longer served, and of the sums it is in."""
        for label in [one for one, names in self._names_by_label.items() if adapter in names]:
            del self._names_by_label[label]
            for counter in (
                self._requests, self._prompt_tokens, self._generation_tokens, self._cached_tokens
            ):  # fmt: skip
                counter.remove_by_labels({"adapter": label})

    def _label(self, names: tuple[str, ...]) -> str:
        label = "+".join(names)
        if label not in self._names_by_label:
            if len(self._names_by_label) >= self._max_adapter_labels:
                return OTHER
            self._names_by_label[label] = set()
        self._names_by_label[label].update(names)
        return label

    def _kept(self, label: str) -> str:
        """Return where to count: a call may end after its adapter was forgotten."""
        return label if label in self._names_by_label else OTHER

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"topwork_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"topwork_{name}", text, ("model", self._model), buckets, self.registry)


class CallMetrics:
    """The moments of one call."""

    def __init__(self, metrics: RouterMetrics, label: str, num_choices: Sequence[int]) -> None:
        self._metrics = metrics
        self._label = label
        self._arrival = time.monotonic()
        self._is_first_choice = [number == 0 for count in num_choices for number in range(count)]
        self._first: list[float | None] = [None] * sum(num_choices)
        self._latest: list[float] = [self._arrival] * sum(num_choices)

    def tokens(self, index: int, count: int) -> None:
        """Note that `count` tokens of one answer are here."""
        if not count:
            return
        now = time.monotonic()
        if self._first[index] is None:
            self._first[index] = now
            self._metrics.first_token(now - self._arrival)
        else:
            self._metrics.next_token((now - self._latest[index]) / count)
        self._latest[index] = now

    def finished(self, index: int, answer: Answer) -> None:
        """Note the end of one answer."""
        assert answer.finish_reason is not None, "an answer that goes on"
        now = time.monotonic()
        first = self._first[index]
        decoding = 0.0 if first is None else now - first
        self._metrics.ended(self._label, answer.finish_reason)
        if self._is_first_choice[index]:
            self._metrics.prompted(self._label, answer)
        self._metrics.answered(self._label, answer, now - self._arrival, decoding)

    def disconnected(self) -> None:
        """Note that the client is gone."""
        self._metrics.disconnected()

    def failed(self, error: BaseException) -> None:
        """Note that the call ends with an error."""
        if isinstance(error, Overloaded):
            self._metrics.rejected("scheduler_queue")
        self._metrics.ended(
            self._label, type(error).__name__ if isinstance(error, TopworkError) else "error"
        )
