"""How results are shown: tables for people, JSON for what compares runs."""

import gc
import os
import platform
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tests.bench.scheduler.core import PAGE_SIZE
from tests.bench.scheduler.goals import Goal, calls, whole
from tests.bench.scheduler.rounds import Row, Spread
from tests.bench.scheduler.side import OURS, PEER

NOTES = f"""\
us: microseconds for each step or request, medians of rounds and [quartiles].
calls: add + plan + commit. whole: with what the caller does between these: ours encodes the plan
and wraps the tokens; theirs has its plan read into Python and the tokens wrapped into events.
a second: by calls. worst: the longest plan + commit of one step in all rounds, us.
Both: pages of {PAGE_SIZE} tokens, host tier off, KV events on (theirs are read after each step;
ours are gathered, and dropped because nobody asks for them, as on a server), each in a process of
its own on the same core,
never at the same time. The garbage collector is on, as in production, and its work is in these
numbers: thresholds {gc.get_threshold()}, and our process holds what a scheduler's process holds."""


def _show(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _spread(spread: Spread) -> str:
    return f"{_show(spread.median)} [{_show(spread.low)} {_show(spread.high)}]"


def _times(spread: Spread) -> str:
    return f"{spread.median:.2f} [{spread.low:.2f} {spread.high:.2f}]"


def _worst(row: Row, side: str) -> str:
    return _show(max(sample.worst for sample in row.samples[side]))


def print_beside(rows: list[Row], console: Console) -> None:
    """Print ours beside theirs, or ours alone if theirs was not measured."""
    sides = {OURS: "ours"}
    if all(PEER in row.samples for row in rows):
        sides[PEER] = "theirs"
    table = Table("", title=" beside ".join(sides), box=SIMPLE_HEAD)
    for what in ("calls, us", "whole, us", "a second", "worst, us"):
        for name in sides.values():
            table.add_column(f"{what}\n{name}", justify="right")
        if PEER in sides and what in ("calls, us", "whole, us"):
            table.add_column("ours /\ntheirs", justify="right")
    for row in rows:
        cells = [row.case.name]
        cells += [_spread(row.spread(side, calls)) for side in sides]
        cells += [_times(row.ratio(calls))] if PEER in sides else []
        cells += [_show(row.spread(side, whole).median) for side in sides]
        cells += [f"{row.ratio(whole).median:.2f}"] if PEER in sides else []
        cells += [f"{1e6 / row.spread(side, calls).median:,.0f}" for side in sides]
        cells += [_worst(row, side) for side in sides]
        table.add_row(*cells)
    console.print(table)


def print_growth(families: list[list[Row]], console: Console) -> None:
    """Print what each size costs, over what the smallest costs."""
    table = Table("", title=f"{OURS}, as it grows", box=SIMPLE_HEAD)
    for column in ("calls, us", "times the smallest", "whole, us", "worst, us"):
        table.add_column(column, justify="right")
    for family in families:
        smallest = family[0].spread(OURS, calls).median
        for row in family:
            measured = row.spread(OURS, calls)
            times = f"{measured.median / smallest:.2f}"
            whole_cell = _spread(row.spread(OURS, whole))
            table.add_row(row.case.name, _spread(measured), times, whole_cell, _worst(row, OURS))
        table.add_section()
    console.print(table)


def print_goals(goals: list[Goal], console: Console) -> None:
    """Print each goal and whether it is met."""
    table = Table("goal", "limit", "measured", "", title="goals", box=SIMPLE_HEAD)
    for goal in goals:
        mark = "[green]met[/]" if goal.is_met else "[red]missed[/]"
        table.add_row(goal.name, f"{goal.limit:g}", f"{goal.measured:.2f}", mark)
    console.print(table)


def machine(load_before: tuple[float, float, float], cpu: int) -> dict[str, Any]:
    """Return what a reader must know of where this ran."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "num_cpus": os.cpu_count(),
        "pinned_to_cpu": cpu,
        "load_before": load_before,
        "load_after": os.getloadavg(),
    }


def as_json(rows: list[Row], goals: list[Goal], where: dict[str, Any]) -> dict[str, Any]:
    """Return everything measured."""
    return {
        "machine": where,
        "page_size": PAGE_SIZE,
        "gc_threshold": gc.get_threshold(),
        "unit": "microseconds for each step or request; worst: of one step",
        "rows": [
            {
                **asdict(row.case),
                "name": row.case.name,
                "sides": {
                    side: {
                        "calls": asdict(row.spread(side, calls)),
                        "whole": asdict(row.spread(side, whole)),
                        "rounds": [asdict(sample) for sample in samples],
                    }
                    for side, samples in row.samples.items()
                },
            }
            for row in rows
        ],
        "goals": [{**asdict(goal), "is_met": goal.is_met} for goal in goals],
    }
