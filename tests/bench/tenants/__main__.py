"""`python -m tests.bench.tenants`: a tenant that asks little, beside one that asks for all."""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from deploy.demo.model import demo_model
from tests.bench.adapters.report import Goal, machine
from tests.bench.tenants.phases import ALONE, COLD, FULL, WARM, Options, Phase, PhaseBench
from tests.bench.tenants.serving import open_server
from tests.bench.tenants.weights import Shared, measure_weights
from worker.model_config_reader import read_model_config

RATIOS = {50: 1.3, 99: 2.0}  # of the time to first token over that alone, by percentile, at most
WEIGHT_ERROR = 0.05  # at most
NAMES = {"warm": WARM, "cold": COLD, "full": FULL}


def goals(phases: list[Phase], shared: list[Shared]) -> Iterator[Goal]:
    """Yield what was to be reached, and what was."""
    for phase in phases[1:]:
        for percent, limit in RATIOS.items():
            ratio = phase.first_token(percent) / phases[0].first_token(percent)
            yield Goal(f"p{percent} of the first token, {phase.name} over alone", limit, ratio)
    for one in shared:
        name = f"tokens by weight {one.weights[0]}:{one.weights[1]}, error"
        yield Goal(name, WEIGHT_ERROR, one.error)


def show(phases: list[Phase], shared: list[Shared]) -> None:
    """Print the tables."""
    print("\n| phase | n | p50 ms | p99 ms | p50 ms by round | large tenant, tok/s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for phase in phases:
        times = [1e3 * phase.first_token(percent) for percent in RATIOS]
        rounds = " ".join(f"{1e3 * median(one):.0f}" for one in phase.first_tokens)
        count = sum(map(len, phase.first_tokens))
        rate = median(phase.large_rates)
        print(
            f"| {phase.name} | {count} | {times[0]:.1f} | {times[1]:.1f} | {rounds} | {rate:.0f} |"
        )
    for one in shared:
        print(f"weights {one.weights}: tokens {one.tokens[0]:.0f} and {one.tokens[1]:.0f}")
    print("\n| goal | at most | measured | |\n| --- | --- | --- | --- |")
    for goal in goals(phases, shared):
        met = "met" if goal.is_met else "missed"
        print(f"| {goal.name} | {goal.limit:g} | {goal.measured:.3f} | {met} |")


def main(
    only: Annotated[str, typer.Option(help="Of warm, cold, full, weights.")] = (
        "warm,cold,full,weights"
    ),
    rounds: Annotated[int, typer.Option(help="That count, after one that does not.")] = 5,
    samples: Annotated[int, typer.Option(help="Of the small tenant in each phase.")] = 30,
    interval: Annotated[float, typer.Option(help="Seconds between its requests.")] = 1.5,
    small_input: Annotated[int, typer.Option(help="Tokens of its prompts.")] = 256,
    small_output: Annotated[int, typer.Option(help="Tokens of its answers.")] = 8,
    large_input: Annotated[int, typer.Option(help="Tokens of the other one's prompts.")] = 128,
    large_output: Annotated[int, typer.Option(help="Of its answers, but in `full`.")] = 64,
    seats: Annotated[int, typer.Option(help="Sequences that run at a time.")] = 64,
    seconds: Annotated[float, typer.Option(help="That weights are watched.")] = 60.0,
    port: Annotated[int | None, typer.Option(help="Of the server; unset: a free one.")] = None,
    flags: Annotated[str, typer.Option(help="More flags of the server.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Written with all.")] = None,
) -> None:
    """Measure a small tenant beside a large one on a server of its own."""
    wanted = only.split(",")
    phases: list[Phase] = []
    shared: list[Shared] = []

    async def measure(url: str, keys: Path) -> None:
        nonlocal phases, shared
        options = Options(
            url=url,
            num_seats=seats,
            vocab_size=read_model_config(demo_model()).vocab_size,
            phases=(ALONE, *(NAMES[name] for name in wanted if name in NAMES)),
            rounds=rounds,
            samples=samples,
            interval=interval,
            small_input=small_input,
            small_output=small_output,
            large_input=large_input,
            large_output=large_output,
        )
        if len(options.phases) > 1:
            phases = await PhaseBench(options, told).run()
        if "weights" in wanted:
            shared = await measure_weights(options, keys, seconds, told)

    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys.yaml")
        with open_server(keys, port, "--max-num-seqs", str(seats), *flags.split()) as server:
            asyncio.run(measure(server.url, keys))
    show(phases, shared)
    print(f"\n{machine()}")
    if json_file is not None:
        found = {"phases": [asdict(one) for one in phases], "shared": [asdict(s) for s in shared]}
        json_file.write_text(json.dumps(found))


def told(text: str) -> None:
    """Say what is going on."""
    print(text, flush=True)


if __name__ == "__main__":
    typer.run(main)
