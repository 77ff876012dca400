"""How results are shown: tables for people, goals, and JSON for what compares runs."""

import os
import platform
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tests.bench.adapters.cold import DEVICE, Place
from tests.bench.adapters.many import FEW, Row, Start
from tests.bench.adapters.parts import Part
from tests.bench.adapters.stall import ALONE, COLD, LOADS, WARM, Phase

REGISTERED_RATIO = 0.9  # tok/s with many registered over that with few, at least
GAP_RATIOS = {50: 1.10, 99: 1.5}  # by percentile, at most
START = 10.0  # seconds until requests are served, at most
IDLE_CPU = 2.0  # percent of one core, at most


@dataclass(slots=True)
class Results:
    """Everything that was measured; what was not is empty."""

    setup: dict[str, Any]  # how the servers ran
    starts: list[Start] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit and what was measured."""

    name: str
    limit: float
    measured: float
    is_floor: bool = False  # whether more is better

    @property
    def is_met(self) -> bool:
        """Whether it is within the limit."""
        return self.measured >= self.limit if self.is_floor else self.measured <= self.limit


def check_goals(results: Results) -> list[Goal]:
    """Return the goals of what was measured."""
    goals = []
    if results.starts:
        size = max(start.num_adapters for start in results.starts)
        ready = median(s.ready for s in results.starts if s.num_adapters == size)
        goals.append(Goal(f"start-up with {size:,} adapters, seconds", START, ready))
    few = [row for row in results.rows if row.workload == "few"]
    if few:
        slow, fast = (row.median(lambda r: r.tokens_per_second) for row in (few[1], few[0]))
        name = f"tok/s with {few[1].num_adapters:,} registered over that with {FEW}"
        goals.append(Goal(name, REGISTERED_RATIO, slow / fast, is_floor=True))
        idle = max(r.idle_cpu or 0.0 for row in few for r in row.rounds)
        goals.append(Goal("CPU of the idle server, percent of a core", IDLE_CPU, idle))
    for over, under in _comparisons(results.phases):
        for percent, limit in GAP_RATIOS.items():
            name = f"p{percent} between tokens: {over.name} over {under.name}"
            goals.append(Goal(name, limit, over.ratio(under, percent)))
    return goals


def _comparisons(phases: list[Phase]) -> list[tuple[Phase, Phase]]:
    by_name = {phase.name: phase for phase in phases}
    pairs = ((COLD, WARM), (COLD, ALONE), (LOADS, ALONE))
    return [(by_name[a], by_name[b]) for a, b in pairs if a in by_name and b in by_name]


def print_all(results: Results, console: Console) -> None:
    """Print a table for each thing that was measured."""
    if results.starts:
        _print_starts(results.starts, console)
    if results.rows:
        _print_rows(results.rows, console)
    if results.phases:
        _print_phases(results.phases, console)
    if results.places:
        _print_places(results.places, console)
    if results.parts:
        _print_parts(results.parts, console)
    goals = check_goals(results)
    if goals:
        _print_goals(goals, console)
    for key, value in results.setup.items():
        console.print(f"{key}: {value}", markup=False)


def as_json(results: Results) -> dict[str, Any]:
    """Return everything measured; times in seconds."""
    goals = [{**asdict(goal), "is_met": goal.is_met} for goal in check_goals(results)]
    return {**asdict(results), "goals": goals}


def machine() -> str:
    """Return what a reader must know of where this runs."""
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    python = platform.python_version()
    return f"{platform.platform()}, Python {python}, {os.cpu_count()} cores, load {load}"


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(first, title=title, box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def _print_starts(starts: list[Start], console: Console) -> None:
    columns = ("registered after s", "ready after s", "starts")
    table = _table("start-up, medians", "adapters registered", *columns)
    for size in sorted({start.num_adapters for start in starts}):
        mine = [start for start in starts if start.num_adapters == size]
        registered = median(start.registered for start in mine)
        ready = median(start.ready for start in mine)
        table.add_row(f"{size:,}", f"{registered:.1f}", f"{ready:.1f}", str(len(mine)))
    console.print(table)


def _print_rows(rows: list[Row], console: Console) -> None:
    table = _table(
        "throughput, medians of rounds",
        "workload",
        *("registered", "tok/s", "requests/s", "TTFT p50 ms", "TTFT p99 ms", "loads/s"),
        *("needed no load", "idle server, % of a core"),
    )
    for row in rows:
        idle = [r.idle_cpu for r in row.rounds if r.idle_cpu is not None]
        table.add_row(
            row.workload,
            f"{row.num_adapters:,}",
            f"{row.median(lambda r: r.tokens_per_second):.1f}",
            f"{row.median(lambda r: r.requests_per_second):.1f}",
            _ms(row.median(lambda r: r.ttft_p50)),
            _ms(row.median(lambda r: r.ttft_p99)),
            f"{row.median(lambda r: r.loads_per_second):.1f}",
            f"{100 * row.median(lambda r: r.hits):.0f}%",
            f"{max(idle):.1f}" if idle else "-",
        )
    console.print(table)
    for row in rows:
        tiers = ", ".join(f"{count:,} {tier}" for tier, count in sorted(row.tiers.items()))
        where = f"{row.workload} of {row.num_adapters:,}: then on {tiers}"
        counted = ", ".join(f"{name} +{value:g}" for name, value in row.rounds[-1].counted.items())
        console.print(f"{where}; last round {counted}", markup=False)


def _print_phases(phases: list[Phase], console: Console) -> None:
    columns = ("gaps", "p50 ms", "p99 ms", "longest ms", "loads into slots", "s for the calls")
    table = _table("time between two tokens of the watched streams, all rounds", "phase", *columns)
    for phase in phases:
        table.add_row(
            phase.name,
            str(sum(map(len, phase.gaps))),
            _ms(phase.gap(50)),
            _ms(phase.gap(99)),
            _ms(phase.gap(100)),
            str(sum(phase.loads)),
            f"{median(phase.seconds):.2f}" if phase.seconds else "-",
        )
    console.print(table)
    table = _table("ratios", "phase over phase", "p50", "p99", "p50 by round")
    for over, under in _comparisons(phases):
        rounds = [
            f"{Phase('', [a]).ratio(Phase('', [b]), 50):.2f}"
            for a, b in zip(over.gaps, under.gaps, strict=True)
        ]
        name = f"{over.name} over {under.name}"
        ratios = (f"{over.ratio(under, percent):.2f}" for percent in GAP_RATIOS)
        table.add_row(name, *ratios, " ".join(rounds))
    console.print(table)


def _print_places(places: list[Place], console: Console) -> None:
    columns = ("samples", "median ms", "least ms", "most ms", "over device ms")
    table = _table("time to first token on an idle server", "adapter in", *columns)
    (device,) = (place for place in places if place.tier == DEVICE)
    for place in places:
        table.add_row(
            place.tier,
            str(len(place.times)),
            _ms(place.median),
            _ms(min(place.times)),
            _ms(max(place.times)),
            _ms(place.median - device.median),
        )
    console.print(table)


def _print_goals(goals: list[Goal], console: Console) -> None:
    table = Table("goal", "limit", "measured", "", title="goals", box=SIMPLE_HEAD)
    for goal in goals:
        mark = "[green]met[/]" if goal.is_met else "[red]missed[/]"
        limit = f"{'>=' if goal.is_floor else '<='} {goal.limit:g}"
        table.add_row(goal.name, limit, f"{goal.measured:.2f}", mark)
    console.print(table)


def _print_parts(parts: list[Part], console: Console) -> None:
    table = _table("parts of a load, alone in one process", "part", "median ms", "most ms")
    for part in parts:
        table.add_row(part.name, f"{1000 * part.median:.2f}", f"{1000 * max(part.times):.2f}")
    console.print(table)
