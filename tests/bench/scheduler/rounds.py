"""All cases on all sides, interleaved, round after round."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import quantiles

from tests.bench.scheduler.cases import BLOCKED, Case
from tests.bench.scheduler.core import Sample
from tests.bench.scheduler.side import OURS, PEER, Side

OpenSide = Callable[[str], Side]
Told = Callable[[], None]  # called after each measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured, and how often in a round."""

    batches: tuple[int, ...] = (1, 16, 64, 256)
    prompts: tuple[int, ...] = (256, 1024, 4096)  # tokens
    contexts: tuple[int, ...] = (128, 1024, 8192)  # tokens
    cached_pages: tuple[int, ...] = (1_000, 100_000, 1_000_000)
    adapters: tuple[int, ...] = (10, 1_000, 10_000)
    blocked: tuple[int, ...] = (0, BLOCKED)  # tokens that wait behind decodes
    steps: int = 300
    requests: int = 200

    def beside_peer(self) -> list[Case]:
        """Return the cases that both sides can do."""
        return [Case("decode", batch, self.steps) for batch in self.batches] + [
            Case(kind, size, self.requests)
            for kind in ("miss", "hit", "evict")
            for size in self.prompts
        ]

    def growth(self) -> list[list[Case]]:
        """Return cases that should cost the same within each list, the smallest first."""
        return [
            [Case("context", size, self.steps) for size in self.contexts],
            [Case("cached pages", size, self.requests) for size in self.cached_pages],
            [Case("adapters", size, self.steps) for size in self.adapters],
            [Case("slot turns", size, self.requests) for size in self.adapters],
            [Case("pages held", size, self.steps) for size in self.blocked],
            [Case("batch full", size, self.steps) for size in self.blocked],
        ]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles over rounds."""

    low: float
    median: float
    high: float


def spread(values: list[float]) -> Spread:
    """Return the spread of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*quantiles(values, n=4, method="inclusive"))


@dataclass(slots=True)
class Row:
    """One case with the samples of all rounds, by side."""

    case: Case
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def spread(self, side: str, what: Callable[[Sample], float]) -> Spread:
        """Return median and quartiles of one side's rounds, microseconds."""
        return spread([what(sample) for sample in self.samples[side]])

    def ratio(self, what: Callable[[Sample], float]) -> Spread:
        """Return ours over theirs, each round by itself."""
        pairs = zip(self.samples[OURS], self.samples[PEER], strict=True)
        return spread([what(ours) / what(theirs) for ours, theirs in pairs])


def measure_beside(
    sizes: Sizes, labels: tuple[str, ...], open_side: OpenSide, rounds: int, told: Told
) -> list[Row]:
    """Measure each case on each side in every round, after one round that is not counted."""
    rows = [Row(case) for case in sizes.beside_peer()]
    with ExitStack() as stack:
        sides = [_open(stack, open_side, label) for label in labels]
        for number in range(rounds + 1):
            sides.reverse()  # nobody is always first
            for row in rows:
                for side in sides:
                    _measure(row, side, is_counted=number > 0)
                    told()
    return rows


def measure_growth(sizes: Sizes, open_side: OpenSide, rounds: int, told: Told) -> list[list[Row]]:
    """Measure ours at every size in every round; each size has a side of its own."""
    families = [[Row(case) for case in cases] for cases in sizes.growth()]
    for family in families:
        with ExitStack() as stack:
            sides = [_open(stack, open_side, OURS) for _ in family]
            for number in range(rounds + 1):
                for row, side in zip(family, sides, strict=True):
                    _measure(row, side, is_counted=number > 0)
                    told()
    return families


def _open(stack: ExitStack, open_side: OpenSide, label: str) -> Side:
    side = open_side(label)
    stack.callback(side.close)
    return side


def _measure(row: Row, side: Side, is_counted: bool) -> None:
    sample = side.measure(row.case)
    if is_counted:
        row.samples.setdefault(side.label, []).append(sample)
