"""Histograms that cost next to nothing until they are shown.

Owns the bounds of all of them, so that what one process counts another one can show: only counts
travel. Belongs to one event loop.
"""

from bisect import bisect_left
from collections.abc import Iterator
from math import inf

import msgspec
from prometheus_client.utils import floatToGoString

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
E2E_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5,
    10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
# Waits may be as short as a step and as long as a request.
WAIT_BUCKETS = tuple(sorted({*TTFT_BUCKETS, *E2E_BUCKETS}))
# A step's parts: planning takes microseconds, a step of a large prefill a second.
STEP_BUCKETS = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05,
    0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10,
)  # fmt: skip
LOAD_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60,
)  # fmt: skip
COUNT_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REQUEST_TOKENS_BUCKETS = tuple(  # up to the longest contexts that there are
    mantissa * 10**power for power in range(7) for mantissa in (1, 2, 5)
)
CHOICES_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTIONS_BUCKETS = (1, 2, 3, 4, 5, 10, 20)


class HistogramCounts(msgspec.Struct, frozen=True):
    """What a histogram has counted, on its way to whoever shows it."""

    counts: tuple[int, ...]  # of each bucket alone; the last one has no bound
    total: float  # of all values

    @property
    def number(self) -> int:
        """Values counted."""
        return sum(self.counts)

    def cumulated(self, bounds: tuple[float, ...]) -> Iterator[tuple[str, float]]:
        """Yield each bucket as Prometheus shows it: its bound, and how many are not over it."""
        count = 0
        for bound, more in zip((*bounds, inf), self.counts, strict=True):
            count += more
            le: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
            yield le, float(count)


def regrouped(
    counted: HistogramCounts, bounds: tuple[float, ...], wanted: tuple[float, ...]
) -> HistogramCounts:
    """Return what a histogram has counted in other buckets, whose bounds are among its own."""
    counts = [0] * (len(wanted) + 1)
    for bound, count in zip((*bounds, inf), counted.counts, strict=True):
        counts[bisect_left(wanted, bound)] += count
    return HistogramCounts(tuple(counts), counted.total)


class Histogram:
    """Counts values by buckets."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value; one that equals a bound is within it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def counts(self) -> HistogramCounts:
        """Return the counts as they are now."""
        return HistogramCounts(tuple(self._counts), self._total)
