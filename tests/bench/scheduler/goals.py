"""What the scheduler should reach, and whether it did."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.bench.scheduler.cases import Kind
from tests.bench.scheduler.core import Sample
from tests.bench.scheduler.rounds import Row
from tests.bench.scheduler.side import OURS, PEER

TIMES_PEER = 1.5  # the time in the scheduler, over the C++ core's
TIMES_PEER_LARGE = 1.0  # of steps of LARGE decodes
LARGE = (64, 256)
STEP_MICROSECONDS = 1000.0  # plan + encode + commit of 256 decodes
HIT_MICROSECONDS = 300.0  # a whole request of 1,024 tokens that are in the cache
TIMES_SMALLEST = 1.5  # the largest size over the smallest
TIMES_ALONE = 1.1  # decodes behind a prompt that is blocked, over decodes alone


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit and what was measured."""

    name: str
    limit: float
    measured: float

    @property
    def is_met(self) -> bool:
        """Whether the median is within the limit."""
        return self.measured <= self.limit


def calls(sample: Sample) -> float:
    """Return the time in the scheduler alone."""
    return sample.calls


def whole(sample: Sample) -> float:
    """Return the time in the scheduler and on the way from and to it."""
    return sample.whole


def check_goals(rows: list[Row], families: list[list[Row]]) -> list[Goal]:
    """Return the goals whose cases were measured."""
    goals: list[Goal] = []
    for row in rows:
        if PEER in row.samples:
            is_large = row.case.kind == "decode" and row.case.size in LARGE
            limit = TIMES_PEER_LARGE if is_large else TIMES_PEER
            name = f"{row.case.name}: ours over {PEER}"
            goals.append(Goal(name, limit, row.ratio(calls).median))
    goals += _within(_find(rows, "decode", 256), whole, STEP_MICROSECONDS)
    goals += _within(_find(rows, "hit", 1024), calls, HIT_MICROSECONDS)
    for family in families:
        first, last = family[0], family[-1]
        times = last.spread(OURS, calls).median / first.spread(OURS, calls).median
        name = f"{last.case.name}: over {first.case.size:,}"
        is_blocked = last.case.kind in ("pages held", "batch full")
        goals.append(Goal(name, TIMES_ALONE if is_blocked else TIMES_SMALLEST, times))
    return goals


def _find(rows: list[Row], kind: Kind, size: int) -> list[Row]:
    return [row for row in rows if row.case.kind == kind and row.case.size == size]


def _within(rows: list[Row], what: Callable[[Sample], float], limit: float) -> list[Goal]:
    return [
        Goal(f"{row.case.name}: us, {what.__name__}", limit, row.spread(OURS, what).median)
        for row in rows
    ]
