"""Rounds over cells and targets in turn: who is not asked sleeps, and who is slow is asked less."""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median

import httpx

from deploy.bench.child import ChildError
from deploy.bench.http_target import BenchError
from tests.bench.peers.cells import Amount, Cell, Figures, What
from tests.bench.peers.environments import InstallError
from tests.bench.peers.target import Opener, Target

ONE_WAVE = 20.0  # seconds of a warm-up, itself one wave; from there each round is one wave
ONE_ROUND = 60.0  # the same; from there one round must do
FAULTS = (BenchError, ChildError, InstallError, httpx.HTTPError)

Told = Callable[[str], None]  # hears what is going on


@dataclass(slots=True)
class Row:
    """What one target did in one cell."""

    what: What
    cell: str
    target: str
    threads: int  # of each peer in this pass; the targets of one pass took turns
    rounds: list[Figures] = field(default_factory=list)  # that count
    warm_up: float = 0.0  # seconds
    fault: str | None = None  # why there is nothing, or no more

    def median(self, figure: str) -> float | None:
        """Return the median of a figure over the rounds."""
        values = [figures[figure] for figures in self.rounds if figure in figures]
        return median(values) if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Targets that run side by side, and the cells that they are asked in turn."""

    openers: tuple[Opener, ...]
    cells: tuple[Cell, ...]
    threads: int


def measure_stage(stage: Stage, rounds: int, amount: Amount, told: Told) -> list[Row]:
    """Measure every cell on every target; one that fails is left out and says why."""
    rows = {
        (cell.what, cell.name, opener.name): Row(cell.what, cell.name, opener.name, stage.threads)
        for cell in stage.cells
        for opener in stage.openers
        if cell.only is None or opener.name in cell.only
    }
    with ExitStack() as stack:
        targets = []
        for opener in stage.openers:
            told(f"starting {opener.name}")
            try:
                target = stack.enter_context(opener.open())
            except FAULTS as error:
                _note(rows.values(), opener.name, f"cannot start: {error}")
                continue
            stack.enter_context(target.tree.paused())
            targets.append(target)
        for number in range(rounds + 1):
            for cell in stage.cells:
                for target in targets:
                    row = rows.get((cell.what, cell.name, target.name))
                    if row is not None and _is_due(row, cell, number, rounds):
                        label = "warm-up" if number == 0 else f"round {number}"
                        told(f"{label}: {cell.what}, {cell.name} on {target.name}")
                        _measure(row, cell, target, number, amount)
            targets.reverse()  # nobody is always first
    return list(rows.values())


def _is_due(row: Row, cell: Cell, number: int, rounds: int) -> bool:
    if row.fault is not None:
        return False
    if cell.is_last:
        return number == rounds
    return number <= 1 or row.warm_up <= ONE_ROUND


def _measure(row: Row, cell: Cell, target: Target, number: int, amount: Amount) -> None:
    is_short = number == 0 or cell.is_last or row.warm_up > ONE_WAVE
    asked = replace(amount, waves=1) if is_short else amount
    began = time.perf_counter()
    try:
        with target.turn():
            figures = cell.measure(target, number, asked)
    except FAULTS as error:
        row.fault = f"{type(error).__name__}: {error}"
        return
    if number == 0:
        row.warm_up = time.perf_counter() - began
    else:
        row.rounds.append(figures)


def _note(rows: Iterable[Row], name: str, fault: str) -> None:
    for row in rows:
        if row.target == name:
            row.fault = fault
