"""What Topwork should reach beside its peers, and whether it did.

A ratio is taken within one pass, whose targets took turns, and of several passes (peers with other
numbers of threads) the worst counts: the best peer with its best number of threads. Peers are those
whose weights have as many bits as ours.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.bench.peers.cells import (
    CONCURRENCIES,
    ITL_P99,
    MEMORY,
    PROMPT_SPEED,
    SPEED,
    WARM,
    What,
)
from tests.bench.peers.install import SAME_WEIGHTS, Peer
from tests.bench.peers.rounds import Row
from tests.bench.peers.stages import ENGINE, MIXES, ONE_RANK, OURS, OURS_PLAIN, OWN_BASE, at

BASE_FLOOR = 1.1  # tok/s over the best peer's
OWN_BASE_FLOOR = 0.8  # tok/s with adapters over that of the base model
MIXED_FLOOR = 3.0  # tok/s over the best peer's
UNUSED_FLOOR = 0.99  # tok/s with adapters that nobody asks over that without
PREFIX_FLOOR = 1.5  # times sooner, and tok/s over the best peer's
PREFILL_FLOOR = 0.9  # prompt tok/s over the best peer's
MEMORY_CEILING = 0.6  # over vLLM's
OVERHEAD_FLOOR = 0.92  # tok/s of the server over the engine's
OVERHEAD_CEILING = 1.3  # p99 between tokens, over the engine's
RANKS_FLOOR = 1.3  # tok/s of two ranks over one


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours over somebody's, and whose."""

    value: float
    over: str


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit and what was measured; None where one of both sides is missing."""

    what: What
    name: str
    limit: float
    measured: Ratio | None
    is_floor: bool = True  # whether more is better

    @property
    def is_met(self) -> bool | None:
        """Whether it is within the limit; None where nothing was measured."""
        if self.measured is None:
            return None
        value = self.measured.value
        return value >= self.limit if self.is_floor else value <= self.limit


def check_goals(rows: Sequence[Row]) -> list[Goal]:
    """Return the goals of what was to be measured."""
    wanted = {row.what for row in rows}
    return [goal for goal in _all_goals(rows) if goal.what in wanted]


def worst_ratio(
    rows: Iterable[Row],
    what: What,
    cell: str,
    figure: str,
    *,
    over: Sequence[str] = SAME_WEIGHTS,
    over_cell: str | None = None,
    less_is_better: bool = False,
) -> Ratio | None:
    """Return ours over that of whoever does best; where less is better the largest is the worst."""
    mine = [row for row in rows if row.what == what]
    ratios = [
        Ratio(ours / theirs, _told(other))
        for row in mine
        if row.target == OURS and row.cell == cell
        for other in mine
        if other.target in over
        and other.cell == (over_cell or cell)
        and other.threads == row.threads
        and (ours := row.median(figure)) is not None
        and (theirs := other.median(figure)) is not None
    ]
    pick = max if less_is_better else min
    return pick(ratios, key=lambda ratio: ratio.value) if ratios else None


def _told(row: Row) -> str:
    if row.target not in SAME_WEIGHTS:
        return row.target
    return f"{row.target}, {row.threads} thread{'s' if row.threads > 1 else ''}"


def _all_goals(rows: Sequence[Row]) -> Iterator[Goal]:
    for c in CONCURRENCIES:
        cell = f"{c} concurrent"
        ratio = worst_ratio(rows, What.BASE, cell, SPEED)
        yield Goal(What.BASE, f"tok/s, {cell}", BASE_FLOOR, ratio)
    for c in CONCURRENCIES:
        for mix in MIXES:
            yield from _adapter_goals(rows, mix, c)
    for c in CONCURRENCIES:
        cell = f"{c} concurrent"
        ratio = worst_ratio(rows, What.UNUSED, cell, SPEED, over=(OURS_PLAIN,))
        yield Goal(What.UNUSED, f"tok/s, {cell}", UNUSED_FLOOR, ratio)
    for cell in sorted({row.cell for row in rows if row.what is What.PREFIX}):
        slower = worst_ratio(rows, What.PREFIX, cell, WARM, less_is_better=True)
        sooner = None if slower is None else Ratio(1 / slower.value, slower.over)
        yield Goal(What.PREFIX, "warm TTFT p50, times sooner", PREFIX_FLOOR, sooner)
        ratio = worst_ratio(rows, What.PREFIX, cell, SPEED)
        yield Goal(What.PREFIX, "tok/s", PREFIX_FLOOR, ratio)
    for cell in sorted({row.cell for row in rows if row.what is What.PREFILL}):
        ratio = worst_ratio(rows, What.PREFILL, cell, PROMPT_SPEED)
        yield Goal(What.PREFILL, f"prompt tok/s, {cell}", PREFILL_FLOOR, ratio)
    for cell in sorted({row.cell for row in rows if row.what is What.MEMORY}):
        ratio = worst_ratio(rows, What.MEMORY, cell, MEMORY, over=(Peer.VLLM,), less_is_better=True)
        yield Goal(What.MEMORY, f"peak, {cell}", MEMORY_CEILING, ratio, is_floor=False)
    for cell in sorted({row.cell for row in rows if row.what is What.OVERHEAD}):
        ratio = worst_ratio(rows, What.OVERHEAD, cell, SPEED, over=(ENGINE,))
        yield Goal(What.OVERHEAD, f"tok/s, {cell}", OVERHEAD_FLOOR, ratio)
        gaps = worst_ratio(rows, What.OVERHEAD, cell, ITL_P99, over=(ENGINE,), less_is_better=True)
        yield Goal(What.OVERHEAD, f"ITL p99, {cell}", OVERHEAD_CEILING, gaps, is_floor=False)
    for cell in sorted({row.cell for row in rows if row.what is What.RANKS}):
        ratio = worst_ratio(rows, What.RANKS, cell, SPEED, over=(ONE_RANK,))
        yield Goal(What.RANKS, f"tok/s, {cell}", RANKS_FLOOR, ratio)


def _adapter_goals(rows: Sequence[Row], mix: str, concurrency: int) -> Iterator[Goal]:
    cell, base = at(mix, concurrency), at(OWN_BASE, concurrency)
    own = worst_ratio(rows, What.ADAPTERS, cell, SPEED, over=(OURS,), over_cell=base)
    told = None if own is None else Ratio(own.value, OWN_BASE)
    yield Goal(What.ADAPTERS, f"tok/s, {cell}", OWN_BASE_FLOOR, told)
    if len(MIXES[mix]) > 1:
        ratio = worst_ratio(rows, What.ADAPTERS, cell, SPEED)
        yield Goal(What.ADAPTERS, f"tok/s, {cell}", MIXED_FLOOR, ratio)
