"""`python -m tests.bench.tenancy_cost`: tokens per second with all of tenancy, over those without.

Two servers of the same tree side by side, asked in turn while the other one's processes stand
still. One has keys with limits that are far away, shares, a request log and a usage file; the other
none of them.
"""

import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
import yaml

from deploy.bench.http_target import HttpTarget
from deploy.bench.workload import Workload
from deploy.demo.model import DEFAULT_TARGET
from tests.bench.adapters.server import BASE, BenchServer
from tests.bench.process_tree import ProcessTree

KEY = "key of a tenant"
FAR = 10**9
LIMITS = {
    "requests_per_minute": FAR,
    "tokens_per_minute": FAR,
    "max_concurrency": FAR,
    "max_waiting": FAR,
}


def tenancy_flags(folder: Path) -> list[str]:
    """Return the flags of a server with everything, and write its files."""
    keys = folder / "keys.yaml"
    entry = {"key": KEY, "tenant": "a tenant", "name": "bench", "weight": 3}
    keys.write_text(yaml.safe_dump([{**entry, "limits": LIMITS, "tenant_limits": LIMITS}]))
    return [
        *("--api-key-file", str(keys), "--request-log", str(folder / "calls")),
        *("--usage-file", str(folder / "usage")),
    ]


def main(
    clients: Annotated[int, typer.Option(help="Each with one request at a time.")] = 16,
    requests: Annotated[int, typer.Option(help="Of one round.")] = 64,
    pairs: Annotated[int, typer.Option(help="Of rounds, after one that does not count.")] = 7,
    output: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    tp: Annotated[int, typer.Option(help="Ranks of each server.")] = 1,
    model: Annotated[Path, typer.Option(help="Directory of the model.")] = DEFAULT_TARGET,
) -> None:
    """Tell tokens per second of each round, and the median of the ratios of pairs."""
    workload = Workload(
        name="tenancy",
        models=(BASE,),
        concurrency=clients,
        num_requests=requests,
        input_len=128,
        output_len=output,
    )
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        flags = tenancy_flags(Path(folder))
        with (
            BenchServer("tenancy", model, "--tp", str(tp), *flags) as full,
            ProcessTree(full.pid).paused(),
            BenchServer("plain", model, "--tp", str(tp), "--no-fairness") as plain,
            ProcessTree(plain.pid).paused(),
        ):
            targets = [
                (full, HttpTarget(full.url, KEY, label="tenancy")),
                (plain, HttpTarget(plain.url, label="plain")),
            ]
            for number in range(pairs + 1):
                rates = {}
                for server, target in targets:
                    with ProcessTree(server.pid).awake():
                        rates[target.label] = target.run(workload, number).tokens_per_second
                targets.reverse()  # nobody is always first
                ratio = rates["tenancy"] / rates["plain"]
                name = f"pair {number}" if number else "warm-up"
                print(
                    f"{name}: {rates['tenancy']:.1f} tok/s with tenancy, {rates['plain']:.1f} "
                    f"without, ratio {ratio:.4f}",
                    flush=True,
                )
                ratios += [ratio] if number else []
    print(f"median of {pairs} pairs: {median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})")


if __name__ == "__main__":
    typer.run(main)
