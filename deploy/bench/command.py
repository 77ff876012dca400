"""`topwork bench`: interleaved rounds over all targets, medians, and ratios to the first peer."""

import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from deploy.bench.engine_target import EngineTarget
from deploy.bench.http_target import BenchError, HttpTarget
from deploy.bench.peft_target import PeftTarget
from deploy.bench.prefix import bench_prefix
from deploy.bench.profile import StepProfile, print_profile
from deploy.bench.workload import Run, Workload
from worker.model_config_reader import read_model_config


class Target(Protocol):
    """Something that answers workloads."""

    label: str

    def run(self, workload: Workload, round_number: int) -> Run:
        """Answer one round of a workload and return its times."""

    def close(self) -> None:
        """Let go of what the target holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to measure; lengths in tokens."""

    model_dir: Path
    url: str
    base: str  # the base model's name
    adapters: dict[str, str]  # directory by name
    concurrencies: tuple[int, ...]
    num_requests: int
    input_len: int
    output_len: int
    rounds: int
    engine_tp: int | None
    peer_threads: tuple[int, ...]
    dtype: str
    prefix_len: int | None  # tokens; measure only what a shared prompt costs
    profile: bool = False  # of the engine: print only where the time of its steps goes
    threads: int | None = None  # of each rank of the engine; None: torch's own choice


def workloads(options: BenchOptions, vocab_size: int) -> list[Workload]:
    """Return the standard set: the base model alone and all adapters mixed, at each concurrency."""
    mixes: dict[str, tuple[str, ...]] = {"base": (options.base,)}
    if options.adapters:
        mixes[f"{len(options.adapters)} adapters"] = tuple(options.adapters)
    return [
        Workload(
            name=f"{mix}, {concurrency} concurrent",
            models=models,
            concurrency=concurrency,
            num_requests=max(options.num_requests, concurrency) // concurrency * concurrency,
            input_len=options.input_len,
            output_len=options.output_len,
            vocab_size=vocab_size,
        )
        for mix, models in mixes.items()
        for concurrency in options.concurrencies
    ]


def run_bench(
    targets: list[Target], loads: list[Workload], rounds: int, console: Console
) -> dict[tuple[str, str], list[Run]]:
    """Run every workload on every target in turn, `rounds` times after one that is not counted."""
    runs: dict[tuple[str, str], list[Run]] = {}
    with Progress(console=console) as progress:
        task = progress.add_task("measuring", total=(rounds + 1) * len(loads) * len(targets))
        for round_number in range(rounds + 1):
            for load in loads:
                for target in targets:
                    label = "warm-up" if round_number == 0 else f"round {round_number}"
                    progress.update(task, description=f"{label}: {load.name} on {target.label}")
                    run = target.run(load, round_number)
                    if round_number > 0:
                        runs.setdefault((load.name, target.label), []).append(run)
                    progress.advance(task)
    return runs


def print_table(
    runs: dict[tuple[str, str], list[Run]],
    loads: list[Workload],
    targets: list[Target],
    console: Console,
) -> None:
    """Print medians over rounds; the ratio is the first target's tok/s over each peer's."""
    load_average = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    table = Table(title=f"medians of rounds; machine load {load_average}")
    for column in ("workload", "target", "tok/s", "TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms"):
        table.add_column(column)
    table.add_column("ITL p99 ms")
    table.add_column("ours / this")
    for load in loads:
        ours = median(r.tokens_per_second for r in runs[load.name, targets[0].label])
        for target in targets:
            mine = runs[load.name, target.label]
            speed = median(r.tokens_per_second for r in mine)
            table.add_row(
                load.name,
                target.label,
                f"{speed:.1f}",
                f"{1000 * median(r.first_token(50) for r in mine):.0f}",
                f"{1000 * median(r.first_token(99) for r in mine):.0f}",
                f"{1000 * median(r.inter_token(50) for r in mine):.1f}",
                f"{1000 * median(r.inter_token(99) for r in mine):.1f}",
                f"{ours / speed:.2f}",
            )
    console.print(table)


def _profile(
    engine: Target, loads: list[Workload], options: BenchOptions, console: Console
) -> None:
    """Run every workload once to warm up and then `rounds` times; print a table for each."""
    try:
        for load in loads:
            engine.run(load, 0)
            profile = StepProfile(options.engine_tp or 1)
            with profile.watching():
                for round_number in range(1, options.rounds + 1):
                    engine.run(load, round_number)
            print_profile(load.name, profile, console)
    finally:
        engine.close()


def bench_all(options: BenchOptions, console: Console) -> None:
    """Measure everything that the options name and print the table.

    Raises:
        BenchError: if there is no such model, or if the server answers with an error.
    """
    try:
        model = read_model_config(options.model_dir)
    except (OSError, ValueError) as error:
        raise BenchError(f"--model-dir {options.model_dir}: {error}") from error
    if options.prefix_len is not None:
        models = (options.base, *options.adapters)
        bench_prefix(options.url, models, options.prefix_len, model.vocab_size, console)
        return
    loads = workloads(options, model.vocab_size)
    ours: Target = (
        HttpTarget(options.url)
        if options.engine_tp is None
        else EngineTarget(
            options.model_dir,
            options.base,
            options.adapters,
            options.engine_tp,
            options.dtype,
            options.threads,
        )
    )
    if options.profile:
        assert options.engine_tp is not None, "only an engine of this process can be looked into"
        _profile(ours, loads, options, console)
        return
    targets = [ours]
    for threads in options.peer_threads:
        targets.append(PeftTarget(options.model_dir, options.base, options.adapters, threads))
    try:
        runs = run_bench(targets, loads, options.rounds, console)
    finally:
        for target in targets:
            target.close()
    print_table(runs, loads, targets, console)
