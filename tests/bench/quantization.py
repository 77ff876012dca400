"""`python -m tests.bench.quantization`: tokens per second in fewer bits, over those in bfloat16.

Engines in one process, without HTTP, asked in turn; each round begins with another one.
"""

from pathlib import Path
from statistics import median
from typing import Annotated, get_args

import typer

from deploy.bench.engine_target import EngineTarget
from deploy.bench.workload import Workload
from deploy.config import ServeConfig
from deploy.demo.model import DEFAULT_TARGET
from worker.model_config_reader import read_model_config

BASE = "base"
ADAPTERS = Path(__file__).resolve().parents[2] / "deploy/demo/adapters"
METHODS = get_args(get_args(ServeConfig.model_fields["quantization"].annotation)[0])


def main(
    concurrency: Annotated[
        list[int] | None, typer.Option(help="Sequences at a time; repeatable.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="After one that does not count.")] = 5,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    tp: Annotated[int, typer.Option(help="Ranks, threads of this process.")] = 1,
    threads: Annotated[int, typer.Option(help="Of each rank.")] = 2,
    adapters: Annotated[bool, typer.Option(help="Ask four adapters, not the base model.")] = False,
    model: Annotated[Path, typer.Option(help="Directory of the model.")] = DEFAULT_TARGET,
) -> None:
    """Print medians of rounds and of ratios, by number of sequences."""
    folders = sorted(path for path in ADAPTERS.iterdir() if path.is_dir())[:4]
    served = {folder.name: str(folder) for folder in folders} if adapters else {}
    targets = {
        method or "bfloat16": EngineTarget(model, BASE, served, tp, "bfloat16", threads, method)
        for method in (None, *METHODS)
    }
    names, vocab_size = list(targets), read_model_config(model).vocab_size
    for number in concurrency or (1, 8, 16):
        workload = Workload(
            name=f"{number} sequences",
            models=tuple(served) or (BASE,),
            concurrency=number,
            num_requests=2 * number,
            input_len=input_len,
            output_len=output_len,
            vocab_size=vocab_size,
        )
        rates: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(rounds + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                rate = targets[name].run(workload, turn).tokens_per_second
                rates[name] += [rate] if turn else []
        for name, found in rates.items():
            ratios = [one / base for one, base in zip(found, rates["bfloat16"], strict=True)]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(
                f"{workload.name}, {name}: {median(found):.1f} tok/s, "
                f"{median(ratios):.2f} ({spread}) of bfloat16",
                flush=True,
            )
    for target in targets.values():
        target.close()


if __name__ == "__main__":
    typer.run(main)
