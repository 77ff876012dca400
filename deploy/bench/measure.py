"""What one answered request tells, and what a run of them adds up to."""

from dataclasses import dataclass


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
