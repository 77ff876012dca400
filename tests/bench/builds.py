"""`python -m tests.bench.builds OTHER`: tokens per second of this tree, over another commit's.

OTHER is a clone of another commit with a venv of its own (`make .venv/bin/.installed`).
"""

from pathlib import Path
from typing import Annotated

import typer

from deploy.bench.workload import Workload
from deploy.demo.model import DEFAULT_TARGET
from tests.bench.adapters.server import BASE
from tests.bench.side_by_side import Side, compare

ROOT = Path(__file__).resolve().parents[2]
ADAPTERS = ROOT / "deploy/demo/adapters"


def main(
    other: Annotated[Path, typer.Argument(help="Clone of another commit, with its own venv.")],
    clients: Annotated[int, typer.Option(help="Each with one request at a time.")] = 8,
    requests: Annotated[int, typer.Option(help="Of one round.")] = 16,
    starts: Annotated[int, typer.Option(help="Of both servers.")] = 4,
    pairs: Annotated[int, typer.Option(help="Of rounds, after one that does not count.")] = 5,
    output: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    tp: Annotated[int, typer.Option(help="Ranks of each server.")] = 2,
    model: Annotated[Path, typer.Option(help="Directory of the model.")] = DEFAULT_TARGET,
) -> None:
    """Tell the ratios of pairs, of the base model and of four adapters, and their medians."""
    folders = sorted(path for path in ADAPTERS.iterdir() if path.is_dir())[:4]
    flags = ("--tp", str(tp), *(f"--adapter={folder.name}={folder}" for folder in folders))
    names = {"base": (BASE,), "adapters": tuple(folder.name for folder in folders)}
    compare(
        model,
        (Side("this", flags), Side("other", flags, root=other.resolve())),
        tuple(
            Workload(
                name=name,
                models=models,
                concurrency=clients,
                num_requests=requests,
                input_len=128,
                output_len=output,
            )
            for name, models in names.items()
        ),
        starts,
        pairs,
    )


if __name__ == "__main__":
    typer.run(main)
