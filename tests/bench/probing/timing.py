"""Whether times tell of another tenant: a classifier that is tried on unseen calls.

It is a threshold, learnt on every other sample of each kind and tried on the rest. What it gets
right is given with the 95 % interval of Wilson; where nothing can be told, half is within it.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

Z = 1.96  # 95 %


@dataclass(frozen=True, slots=True)
class Verdict:
    """How often unseen samples of two kinds were told apart rightly."""

    name: str
    num_right: int
    num_tried: int

    @property
    def accuracy(self) -> float:
        """The part of what was tried."""
        return self.num_right / self.num_tried

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the accuracy."""
        n, p = self.num_tried, self.accuracy
        middle = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z * sqrt(p * (1 - p) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
        return middle - half, middle + half

    @property
    def tells_nothing(self) -> bool:
        """Whether guessing would do as well."""
        return self.interval[0] <= 0.5


def measured(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def collect(
    first: Callable[[int], float], second: Callable[[int], float], count: int, seed: int
) -> tuple[list[float], list[float]]:
    """Return the times of so many calls of two kinds, in an order that is drawn."""
    order = [kind for kind in (0, 1) for _ in range(count)]
    random.Random(seed).shuffle(order)
    times: tuple[list[float], list[float]] = ([], [])
    for kind in order:
        times[kind].append((first, second)[kind](len(times[kind])))
    return times


def classify(name: str, first: list[float], second: list[float]) -> Verdict:
    """Learn a threshold on one half and try it on the other."""
    learnt = [(value, 0) for value in first[::2]] + [(value, 1) for value in second[::2]]
    tried = [(value, 0) for value in first[1::2]] + [(value, 1) for value in second[1::2]]
    threshold, low_kind = _best(learnt)
    right = sum((low_kind if value <= threshold else 1 - low_kind) == kind for value, kind in tried)
    return Verdict(name, right, len(tried))


def _best(samples: list[tuple[float, int]]) -> tuple[float, int]:
    """Return the threshold that is right most often, and the kind that is not above it."""
    samples = sorted(samples)
    num_second = sum(kind for _, kind in samples)
    num_first = len(samples) - num_second
    best = (max(num_first, num_second), samples[-1][0], int(num_second > num_first))
    below = [0, 0]
    for value, kind in samples:
        below[kind] += 1
        for low_kind in (0, 1):
            above = (num_first, num_second)[1 - low_kind] - below[1 - low_kind]
            best = max(best, (below[low_kind] + above, value, low_kind))
    return best[1], best[2]
