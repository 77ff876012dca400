"""Histograms that cost next to nothing until they are shown.

Owns the bounds of all of them, so that what one process counts another one can show: only counts
travel. Belongs to one event loop.
"""

from bisect import bisect_left

import msgspec

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
# A step's parts: planning takes microseconds, a step of a large prefill a second.
STEP_BUCKETS = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05,
    0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10,
)  # fmt: skip
LOAD_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60,
)  # fmt: skip
COUNT_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)


class HistogramCounts(msgspec.Struct, frozen=True):
    """What a histogram has counted, on its way to whoever shows it."""

    counts: tuple[int, ...]  # of each bucket alone; the last one has no bound
    total: float  # of all values

    @property
    def number(self) -> int:
        """Values counted."""
        return sum(self.counts)


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
