"""`python -m tests.bench.tenancy_cost`: tokens per second with all of tenancy, over those without.

One server has keys with limits that are far away, shares, a request log and a usage file; the other
none of them.
"""

import tempfile
from pathlib import Path
from typing import Annotated

import typer
import yaml

from deploy.bench.workload import Workload
from deploy.demo.model import DEFAULT_TARGET
from tests.bench.adapters.server import BASE
from tests.bench.side_by_side import Side, compare

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
    starts: Annotated[int, typer.Option(help="Of both servers.")] = 4,
    pairs: Annotated[int, typer.Option(help="Of rounds, after one that does not count.")] = 3,
    output: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    tp: Annotated[int, typer.Option(help="Ranks of each server.")] = 1,
    model: Annotated[Path, typer.Option(help="Directory of the model.")] = DEFAULT_TARGET,
) -> None:
    """Tell the ratios of pairs, and their median."""
    workload = Workload(
        name="base",
        models=(BASE,),
        concurrency=clients,
        num_requests=requests,
        input_len=128,
        output_len=output,
    )
    ranks = ("--tp", str(tp))
    with tempfile.TemporaryDirectory() as folder:
        tenancy = Side("tenancy", (*ranks, *tenancy_flags(Path(folder))), KEY)
        plain = Side("plain", (*ranks, "--no-fairness"))
        compare(model, (tenancy, plain), (workload,), starts, pairs)


if __name__ == "__main__":
    typer.run(main)
