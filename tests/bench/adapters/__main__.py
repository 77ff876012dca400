"""`python -m tests.bench.adapters`: what many adapters cost, on servers that it starts itself."""

import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from deploy.bench.http_target import BenchError
from deploy.demo.model import demo_model
from tests.bench.adapters.many import FEW
from tests.bench.adapters.measuring import Amount, What, make_setup, measure
from tests.bench.adapters.report import as_json, print_all
from tests.bench.adapters.stall import MIN_SLOTS


def run(
    only: Annotated[list[What] | None, typer.Option(help="Repeatable; none: all.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Ranks; each has cores / ranks threads.")] = 1,
    adapters: Annotated[int, typer.Option(min=FEW, help="Registered, of about 2 MB.")] = 2000,
    slots: Annotated[int, typer.Option(min=MIN_SLOTS, help="Of each rank.")] = 16,
    in_host: Annotated[int, typer.Option(help="Adapters that host memory has room for.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="That count; not of `cold`, `parts`.")] = 3,
    requests: Annotated[int, typer.Option(min=8, help="In a round of `many`.")] = 120,
    samples: Annotated[int, typer.Option(min=1, help="Of each place in `cold`; `parts`.")] = 12,
    load_only: Annotated[bool, typer.Option(help="In `stall`, no requests beside loads.")] = False,
    drop_page_cache: Annotated[
        bool, typer.Option(help="Read adapters that nobody has touched from the disk itself.")
    ] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write it all here.")
    ] = None,
) -> None:
    """Measure what thousands of adapters cost."""
    amount = Amount(
        rounds=rounds,
        num_requests=requests,
        samples=samples,
        load_only=load_only,
        drop_page_cache=drop_page_cache,
    )
    demo_model()
    setup = make_setup(tp, adapters, slots, in_host)
    errors = Console(stderr=True)
    try:
        with errors.status("measuring") as status:
            results = measure(set(only or What), setup, amount, status.update)
    except BenchError as error:
        errors.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
    print_all(results, Console(width=None if sys.stdout.isatty() else 180))
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(results), indent=2) + "\n")


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit)  # so that no server outlives this process
    typer.run(run)
