"""`python -m tests.bench.steps OTHER`: how long a step takes this tree's engine, over another's.

OTHER is as for `tests.bench.builds`. Both engines, of one rank, do the same steps, each in turn
with the other's: whatever else the machine does in a second meets both, so that a percent can be
told where two servers, asked in turn for seconds, differ by ten. What is not in it is what HTTP,
Ray and several ranks cost. The decodes of eight requests; their prompts are told apart.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from deploy.demo.model import DEFAULT_TARGET

ROOT = Path(__file__).resolve().parents[2]
ADAPTERS = ROOT / "deploy/demo/adapters"
NUM_PROMPT_STEPS = 8  # at most, in which prompts are computed


class Engine:
    """An engine of one tree, in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def ask(self, what: str) -> Any:
        """Return the answer to a line."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the engine has ended with {self._process.wait()}"
        return json.loads(line)


@contextmanager
def _engine(root: Path, model: Path, threads: int, adapters: list[Path]) -> Iterator[Engine]:
    """Start an engine, which ends when nobody asks it any more."""
    child = ROOT / "tests/bench/step_child.py"
    command = [root / ".venv/bin/python", child, model, str(threads), *adapters]
    environment = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    with subprocess.Popen(
        [str(part) for part in command],
        cwd=root,
        env={**os.environ, **environment, "PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Engine(process)


def main(
    other: Annotated[Path, typer.Argument(help="Clone of another commit, with its own venv.")],
    starts: Annotated[int, typer.Option(help="Of both engines.")] = 4,
    rounds: Annotated[int, typer.Option(help="Of each start, after one that does not count.")] = 3,
    threads: Annotated[int, typer.Option(help="Of each engine.")] = 2,
    model: Annotated[Path, typer.Option(help="Directory of the model.")] = DEFAULT_TARGET,
) -> None:
    """Print the other's time over this one's, of each start and of all."""
    adapters = sorted(path for path in ADAPTERS.iterdir() if path.is_dir())[:4]
    ratios: dict[str, list[float]] = {"base": [], "adapters": []}
    for start in range(starts):
        with ExitStack() as stack:
            engines = [
                stack.enter_context(_engine(root, model, threads, adapters))
                for root in ((ROOT, other.resolve()) if start % 2 else (other.resolve(), ROOT))
            ]
            this, that = engines if start % 2 else engines[::-1]
            for kind in ratios:
                found = [_round(kind, this, that) for _ in range(rounds + 1)][1:]
                ratios[kind].append(sum(b for _, b in found) / sum(a for a, _ in found))
                told = ", ".join(f"{1e3 * a:.2f} and {1e3 * b:.2f} ms" for a, b in found)
                print(
                    f"start {start + 1}, {kind}: {ratios[kind][-1]:.4f} (a step: {told})",
                    flush=True,
                )
    for kind, of_starts in ratios.items():
        spread = f"{min(of_starts):.4f} to {max(of_starts):.4f}"
        print(f"{kind}: median of {starts} starts {median(of_starts):.4f} ({spread})")


def _round(kind: str, this: Engine, that: Engine) -> tuple[float, float]:
    """Return the mean seconds of both engines' steps that only decode."""
    for engine in (this, that):
        engine.ask(kind)
    taken: list[tuple[float, float]] = []
    while True:
        first, second = (this, that) if len(taken) % 2 else (that, this)
        one, two = first.ask("step"), second.ask("step")
        assert one[0] == two[0], "one of them has more to do"
        if not one[0]:
            break
        taken.append((one[1], two[1]) if first is this else (two[1], one[1]))
    decodes = taken[NUM_PROMPT_STEPS:]
    ours, theirs = (sum(column) / len(decodes) for column in zip(*decodes, strict=True))
    return ours, theirs


if __name__ == "__main__":
    typer.run(main)
