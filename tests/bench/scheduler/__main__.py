"""`python -m tests.bench.scheduler`: measure our scheduler, beside its peer where that is."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from tests.bench.scheduler.cases import MAX_ROUNDS
from tests.bench.scheduler.goals import check_goals
from tests.bench.scheduler.our_core import load_production_heap
from tests.bench.scheduler.profile import print_profile
from tests.bench.scheduler.report import (
    NOTES,
    as_json,
    machine,
    print_beside,
    print_goals,
    print_growth,
)
from tests.bench.scheduler.rounds import Sizes, measure_beside, measure_growth
from tests.bench.scheduler.side import OURS, PEER, ChildSide, Side


def run(
    peer_python: Annotated[
        Path | None, typer.Option(help=f"Python that has {PEER}; none: ours alone.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=MAX_ROUNDS - 1, help="Counted ones.")] = 7,
    growth: Annotated[bool, typer.Option(help="Also measure ours as it grows.")] = True,
    cpu: Annotated[int | None, typer.Option(help="Where to run; none: the last one.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write it all here.")
    ] = None,
    profile: Annotated[bool, typer.Option(help="Only print where our time goes.")] = False,
) -> None:
    """Measure what scheduling decisions cost."""
    console = Console(width=None if sys.stdout.isatty() else 180)
    if profile:
        load_production_heap()
        print_profile(console)
        return
    core = max(os.sched_getaffinity(0)) if cpu is None else cpu
    pythons = {OURS: sys.executable}
    if peer_python is not None:
        pythons[PEER] = str(peer_python.absolute())

    def open_side(label: str) -> Side:
        return ChildSide(label, pythons[label], core)

    load, sizes = os.getloadavg(), Sizes()
    num_growing = sum(map(len, sizes.growth())) if growth else 0
    total = (rounds + 1) * (len(pythons) * len(sizes.beside_peer()) + num_growing)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=total)

        def told() -> None:
            progress.advance(task)

        rows = measure_beside(sizes, tuple(pythons), open_side, rounds, told)
        families = measure_growth(sizes, open_side, rounds, told) if growth else []
    goals, where = check_goals(rows, families), machine(load, core)
    print_beside(rows, console)
    if families:
        print_growth(families, console)
    print_goals(goals, console)
    console.print(NOTES, markup=False)
    console.print(f"{rounds} rounds; {where}", markup=False)
    if json_file is not None:
        every = rows + [row for family in families for row in family]
        json_file.write_text(json.dumps(as_json(every, goals, where), indent=2) + "\n")


if __name__ == "__main__":
    typer.run(run)
