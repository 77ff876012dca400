"""What Topwork should reach beside its peers, and whether it did.

A ratio is taken within one pass, whose targets took turns, and of several passes (peers with other
numbers of threads) the worst counts: the best peer with its best number of threads. Peers are those
whose weights have as many bits as ours; where ours are quantized, our own bfloat16 is one more.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.bench.peers.cells import (
    CONCURRENCIES,
    ITL_P99,
    MEMORY,
    MEMORY_CONCURRENCY,
    PROMPT_SPEED,
    SPEED,
    WARM,
    What,
)
from tests.bench.peers.install import WEIGHT_BITS, Peer, peers_of
from tests.bench.peers.rounds import Row
from tests.bench.peers.stages import (
    ENGINE,
    IN_BFLOAT16,
    MIXES,
    ONE_RANK,
    OURS,
    OURS_PLAIN,
    OWN_BASE,
    at,
)

# Tokens per second over the best peer's, by bits of weights and number of clients.
BASE_FLOORS = {
    16: dict.fromkeys(CONCURRENCIES, 1.1),
    8: {1: 1.3, 8: 2.5, 16: 3.0},
    4: {1: 1.1, 8: 2.0, 16: 2.5},
}
OWN_BITS_FLOORS = {1: 1.25, 8: 1.4, 16: 1.4}  # tok/s in int8 over those in bfloat16
OWN_BITS_PREFILL_FLOOR = 1.2  # prompt tok/s in int8 over those in bfloat16, with VNNI or AMX
OWN_BITS_CEILING = 0.45  # memory in int4 over that in bfloat16, of a model of a billion weights
OWN_BASE_FLOOR = 0.8  # tok/s with adapters over that of the base model
EIGHT_MIXED_FLOORS = {1: 0.9, 8: 0.85, 16: 0.85}  # the same of eight, in fewer bits
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


def check_goals(rows: Sequence[Row], weight_bits: int = 16) -> list[Goal]:
    """Return the goals of what was to be measured, with our weights in so many bits."""
    wanted = {row.what for row in rows}
    goals = (*_all_goals(rows, weight_bits), *_goals_over_bfloat16(rows, weight_bits))
    return [goal for goal in goals if goal.what in wanted]


def worst_ratio(
    rows: Iterable[Row],
    what: What,
    cell: str,
    figure: str,
    *,
    over: Sequence[str],
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
    if row.target not in WEIGHT_BITS:
        return row.target
    return f"{row.target}, {row.threads} thread{'s' if row.threads > 1 else ''}"


def _goals_over_bfloat16(rows: Sequence[Row], weight_bits: int) -> Iterator[Goal]:
    """Return what fewer bits should gain over our own 16."""
    over = (IN_BFLOAT16,)
    if weight_bits == 8:
        for c, floor in OWN_BITS_FLOORS.items():
            cell = f"{c} concurrent"
            ratio = worst_ratio(rows, What.BASE, cell, SPEED, over=over)
            yield Goal(What.BASE, f"tok/s, {cell}", floor, ratio)
        for cell in sorted({row.cell for row in rows if row.what is What.PREFILL}):
            ratio = worst_ratio(rows, What.PREFILL, cell, PROMPT_SPEED, over=over)
            yield Goal(What.PREFILL, f"prompt tok/s, {cell}", OWN_BITS_PREFILL_FLOOR, ratio)
    if weight_bits == 4:
        cell = at("base", MEMORY_CONCURRENCY)  # of models that have no adapters: the large one
        ratio = worst_ratio(rows, What.MEMORY, cell, MEMORY, over=over, less_is_better=True)
        yield Goal(What.MEMORY, f"peak, {cell}", OWN_BITS_CEILING, ratio, is_floor=False)


def _all_goals(rows: Sequence[Row], weight_bits: int) -> Iterator[Goal]:
    peers = peers_of(weight_bits)
    for c in CONCURRENCIES:
        cell = f"{c} concurrent"
        ratio = worst_ratio(rows, What.BASE, cell, SPEED, over=peers)
        yield Goal(What.BASE, f"tok/s, {cell}", BASE_FLOORS[weight_bits][c], ratio)
    for c in CONCURRENCIES:
        for mix in MIXES:
            yield from _adapter_goals(rows, mix, c, weight_bits)
    for c in CONCURRENCIES:
        cell = f"{c} concurrent"
        ratio = worst_ratio(rows, What.UNUSED, cell, SPEED, over=(OURS_PLAIN,))
        yield Goal(What.UNUSED, f"tok/s, {cell}", UNUSED_FLOOR, ratio)
    for cell in sorted({row.cell for row in rows if row.what is What.PREFIX}):
        slower = worst_ratio(rows, What.PREFIX, cell, WARM, over=peers, less_is_better=True)
        sooner = None if slower is None else Ratio(1 / slower.value, slower.over)
        yield Goal(What.PREFIX, "warm TTFT p50, times sooner", PREFIX_FLOOR, sooner)
        ratio = worst_ratio(rows, What.PREFIX, cell, SPEED, over=peers)
        yield Goal(What.PREFIX, "tok/s", PREFIX_FLOOR, ratio)
    for cell in sorted({row.cell for row in rows if row.what is What.PREFILL}):
        ratio = worst_ratio(rows, What.PREFILL, cell, PROMPT_SPEED, over=peers)
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


def _adapter_goals(
    rows: Sequence[Row], mix: str, concurrency: int, weight_bits: int
) -> Iterator[Goal]:
    cell, base = at(mix, concurrency), at(OWN_BASE, concurrency)
    own = worst_ratio(rows, What.ADAPTERS, cell, SPEED, over=(OURS,), over_cell=base)
    told = None if own is None else Ratio(own.value, OWN_BASE)
    is_eight = weight_bits < 16 and mix == "eight mixed"
    floor = EIGHT_MIXED_FLOORS[concurrency] if is_eight else OWN_BASE_FLOOR
    yield Goal(What.ADAPTERS, f"tok/s, {cell}", floor, told)
    if len(MIXES[mix]) > 1:
        ratio = worst_ratio(rows, What.ADAPTERS, cell, SPEED, over=peers_of(weight_bits))
        yield Goal(What.ADAPTERS, f"tok/s, {cell}", MIXED_FLOOR, ratio)
