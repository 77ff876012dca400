"""`python -m tests.bench.structured`: answers of 300 schemas, all valid or refused; their cost."""

import asyncio
import contextlib
import re
from collections.abc import Iterator
from statistics import median
from typing import Annotated

import httpx
import typer

from deploy.demo.model import demo_model
from tests.bench.adapters.server import BASE, BenchServer
from tests.bench.structured.cost import Speeds, measure
from tests.bench.structured.instances import let_through
from tests.bench.structured.schemas import suite_cases, tool_cases
from tests.bench.structured.validity import asks_of, outcomes, table
from tests.end_to_end.server import adapter_dirs

_COUNTERS = ("grammar_masks", "late_grammar_masks", "forced_tokens")


@contextlib.contextmanager
def _server(url: str | None, tp: int) -> Iterator[str]:
    if url is not None:
        yield url
        return
    flags = ["--tp", str(tp)]
    for name, directory in adapter_dirs().items():
        flags += ["--adapter", f"{name}={directory}"]
    with BenchServer("structured", demo_model(), *flags) as server:
        yield server.url


def _counts(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics", timeout=60.0).raise_for_status().text
    return {
        name: sum(map(float, re.findall(rf"^topwork_engine_{name}_total\S* (\S+)$", text, re.M)))
        for name in _COUNTERS
    }


def _show(title: str, before: dict[str, float], after: dict[str, float]) -> None:
    said = ", ".join(f"{name} {after[name] - before[name]:.0f}" for name in _COUNTERS)
    print(f"{title}: {said}")


def _show_speeds(speeds: Speeds) -> None:
    print("| workload | tok/s, median of the rounds | over free text |\n| --- | --- | --- |")
    for name in ("free", "drawn", "template"):
        print(f"| {name} | {median(getattr(speeds, name)):.1f} | {speeds.ratio(name):.3f} |")


def main(
    suite: Annotated[int, typer.Option(help="Schemas of the public suite.")] = 200,
    tools: Annotated[int, typer.Option(help="Parameters of real tools.")] = 100,
    max_tokens: Annotated[int, typer.Option(help="Of each of these answers.")] = 512,
    rounds: Annotated[int, typer.Option(help="Of the measurement; 0: none.")] = 5,
    answers: Annotated[int, typer.Option(help="Of each client in a round.")] = 2,
    clients: Annotated[int, typer.Option(help="At a time.")] = 8,
    tp: Annotated[int, typer.Option(help="Ranks.")] = 1,
    url: Annotated[str | None, typer.Option(help="A server that runs, with our adapters.")] = None,
) -> None:
    """Ask for many forms, look at all answers, and measure."""
    cases = [*suite_cases(suite), *tool_cases(tools)]
    num_tried, slips = let_through(suite_cases(1_000_000))
    print(f"{num_tried} values that the suite calls invalid, let through: {slips or 'none'}")
    with _server(url, tp) as address:
        before = _counts(address)
        asks = asks_of(cases, BASE, list(adapter_dirs()))
        found = asyncio.run(outcomes(address, asks, max_tokens, clients))
        middle = _counts(address)
        print(f"{len(cases)} schemas, {len(asks)} answers\n{table(found)}")
        _show("meanwhile", before, middle)
        if rounds:
            _show_speeds(asyncio.run(measure(address, BASE, rounds, clients, answers)))
            _show("meanwhile", middle, _counts(address))
    assert not slips and not [one for one in found if one.kind in ("invalid", "failed")], (
        "see above"
    )


if __name__ == "__main__":
    typer.run(main)
