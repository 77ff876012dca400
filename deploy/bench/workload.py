"""What a benchmark asks, the same of all that are measured, and what their answers add up to."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a workload."""

    model: str  # base model or adapter name
    token_ids: tuple[int, ...]
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A closed loop: `concurrency` clients, each with one request in flight at a time."""

    name: str
    models: tuple[str, ...]  # asked in turn
    concurrency: int
    num_requests: int
    input_len: int  # tokens
    output_len: int  # tokens, always all of them
    shared_prefix_len: int = 0  # first tokens that all prompts to one model have in common
    vocab_size: int = 32000
    first: int = 0  # index of the first request: what an earlier workload of this name asked

    def asks(self, round_number: int) -> tuple[Ask, ...]:
        """Return the requests of one round; no two rounds share a prompt."""
        indices = range(self.first, self.first + self.num_requests)
        return tuple(self._ask(index, round_number) for index in indices)

    def _ask(self, index: int, round_number: int) -> Ask:
        model = self.models[index % len(self.models)]
        common = random.Random(f"{self.name}/{round_number}/{model}")
        unique = random.Random(f"{self.name}/{round_number}/{model}/{index}")
        prefix = self._draw(common, self.shared_prefix_len)
        return Ask(
            model, prefix + self._draw(unique, self.input_len - len(prefix)), self.output_len
        )

    def _draw(self, source: random.Random, count: int) -> tuple[int, ...]:
        low = min(
            100, self.vocab_size // 2
        )  # the first ids are special tokens in most vocabularies
        return tuple(source.randrange(low, self.vocab_size) for _ in range(count))


@dataclass(frozen=True, slots=True)
class Sample:
    """The times of one request, in seconds on one clock."""

    sent: float
    token_times: tuple[float, ...]  # when each output token arrived


@dataclass(frozen=True, slots=True)
class Run:
    """Everything measured in one pass over a workload."""

    samples: tuple[Sample, ...]

    @property
    def seconds(self) -> float:
        """Time from the first request sent to the last token received."""
        return max(s.token_times[-1] for s in self.samples) - min(s.sent for s in self.samples)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over wall time."""
        return sum(len(s.token_times) for s in self.samples) / self.seconds

    def first_token(self, percent: float) -> float:
        """Return a percentile of the time to first token, in seconds."""
        return percentile([s.token_times[0] - s.sent for s in self.samples], percent)

    def inter_token(self, percent: float) -> float:
        """Return a percentile of the time between two tokens of one request, in seconds."""
        gaps = [
            later - earlier
            for s in self.samples
            for earlier, later in zip(s.token_times, s.token_times[1:], strict=False)
        ]
        return percentile(gaps, percent)


def percentile(values: list[float], percent: float) -> float:
    """Return the nearest-rank percentile of a non-empty list."""
    assert values, "no values"
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
