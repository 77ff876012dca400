"""How results are shown: a table for each thing that was measured, goals, and JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tests.bench.peers.cells import (
    COLD,
    ITL_P50,
    ITL_P99,
    MEMORY,
    PROMPT_SPEED,
    SPEED,
    TTFT,
    WARM,
    What,
)
from tests.bench.peers.goals import Goal, check_goals
from tests.bench.peers.install import WEIGHT_BITS, Peer
from tests.bench.peers.rounds import Row
from tests.bench.peers.stages import IN_BFLOAT16, OURS

LOAD_COLUMNS = (SPEED, TTFT, ITL_P50, ITL_P99)
COLUMNS = {
    What.BASE: LOAD_COLUMNS,
    What.ADAPTERS: LOAD_COLUMNS,
    What.UNUSED: LOAD_COLUMNS,
    What.PREFIX: (COLD, WARM, SPEED),
    What.PREFILL: (PROMPT_SPEED, TTFT),
    What.MEMORY: (MEMORY,),
    What.OVERHEAD: LOAD_COLUMNS,
    What.RANKS: LOAD_COLUMNS,
}
COMPARED = {  # the column of "ours / this"
    **dict.fromkeys(What, SPEED),
    What.PREFILL: PROMPT_SPEED,
    What.MEMORY: MEMORY,
}
TITLES = {
    What.BASE: "the base model; peers serve no adapters",
    What.ADAPTERS: "eight adapters served",
    What.UNUSED: "the base model, beside our server without adapters",
    What.PREFIX: "a prompt per adapter that its requests begin with",
    What.PREFILL: "one long prompt of the base model",
    What.MEMORY: "memory of all processes, shared pages once",
    What.OVERHEAD: "our server beside our engine in one plain process",
    What.RANKS: "our server with two ranks beside one with one, each of one thread",
}


@dataclass(slots=True)
class Results:
    """Everything that was measured."""

    setup: dict[str, Any]  # what a reader must know
    rows: list[Row] = field(default_factory=list)
    weight_bits: int = 16  # of ours


def print_all(results: Results, console: Console) -> None:
    """Print what was measured, and the goals."""
    for what in What:
        rows = [row for row in results.rows if row.what is what]
        if rows:
            _print_rows(what, rows, results.weight_bits, console)
    goals = check_goals(results.rows, results.weight_bits)
    if goals:
        _print_goals(goals, results.weight_bits, console)
    for target, fault in _faults(results.rows).items():
        console.print(f"{target}: {fault}", markup=False, highlight=False)
    for key, value in results.setup.items():
        console.print(f"{key}: {value}", markup=False, highlight=False)


def as_json(results: Results) -> dict[str, Any]:
    """Return everything measured, by round."""
    checked = check_goals(results.rows, results.weight_bits)
    goals = [{**asdict(goal), "is_met": goal.is_met} for goal in checked]
    return {**asdict(results), "goals": goals}


def _faults(rows: Sequence[Row]) -> dict[str, str]:
    """Return why a target is missing somewhere, once where several cells have the same reason."""
    return {
        f"{row.target} ({row.what}, {row.threads} threads)": row.fault
        for row in reversed(rows)
        if row.fault is not None
    }


def _print_rows(what: What, rows: list[Row], weight_bits: int, console: Console) -> None:
    columns, compared = COLUMNS[what], COMPARED[what]
    table = Table("", "target", title=f"{what}: {TITLES[what]}; medians of rounds", box=SIMPLE_HEAD)
    for column in ("peer threads", "rounds", *columns, "ours / this"):
        table.add_column(column, justify="right")
    ours = {(r.cell, r.threads): r.median(compared) for r in rows if r.target == OURS}
    for row in sorted(rows, key=lambda r: _order(rows, r)):
        mine, theirs = ours.get((row.cell, row.threads)), row.median(compared)
        table.add_row(
            row.cell,
            _named(row.target, weight_bits),
            str(row.threads or "-"),
            str(len(row.rounds)) if row.fault is None else f"{len(row.rounds)}, failed",
            *(_shown(row.median(column)) for column in columns),
            "-" if mine is None or theirs is None else f"{mine / theirs:.2f}",
        )
    console.print(table)


def _order(rows: list[Row], row: Row) -> tuple[int, int]:
    """Order by cell as measured, all threads together."""
    cells = list(dict.fromkeys(r.cell for r in rows))
    return cells.index(row.cell), row.threads


def _named(target: str, weight_bits: int) -> str:
    """Return what a target is called: one whose weights have other bits than ours says so."""
    bits = WEIGHT_BITS[Peer(target)] if target in tuple(Peer) else weight_bits
    if target == IN_BFLOAT16 or bits == weight_bits:
        return target
    return f"{target}, {bits} bits, ours {weight_bits}"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _print_goals(goals: list[Goal], weight_bits: int, console: Console) -> None:
    title = f"goals; of peers only those of {weight_bits}-bit weights"
    table = Table("", "what", "goal", "measured", "over", "", title=title, box=SIMPLE_HEAD)
    marks = {True: "[green]met[/]", False: "[red]missed[/]", None: "not measured"}
    for goal in goals:
        measured = goal.measured
        table.add_row(
            goal.what,
            goal.name,
            f"{'>=' if goal.is_floor else '<='} {goal.limit:g}",
            "-" if measured is None else f"{measured.value:.2f}",
            "-" if measured is None else measured.over,
            marks[goal.is_met],
        )
    console.print(table)
