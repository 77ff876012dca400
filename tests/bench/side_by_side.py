"""Two servers on one machine, asked in turn while the other one's processes stand still.

Two servers of one tree may differ by where their memory lies, for as long as they run: they are
started anew several times, each time the other one first. Speeds are compared pair by pair, since
a machine's own speed drifts.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from deploy.bench.http_target import HttpTarget
from deploy.bench.workload import Workload
from tests.bench.adapters.server import BenchServer
from tests.bench.process_tree import ProcessTree


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two servers."""

    name: str
    flags: tuple[str, ...]
    key: str | None = None  # of its API
    root: Path | None = None  # of another clone, with a venv of its own; None: this tree


def compare(
    model: Path, sides: tuple[Side, Side], workloads: tuple[Workload, ...], starts: int, pairs: int
) -> dict[str, list[float]]:
    """Return, by workload, tokens per second of the first side over the second's, pair by pair.

    Each start of both begins with a pair that does not count. Prints every pair, and medians.
    """
    ratios: dict[str, list[float]] = {workload.name: [] for workload in workloads}
    for start in range(starts):
        order = sides if start % 2 == 0 else sides[::-1]
        found = _compare_once(model, order, sides, workloads, pairs)
        for name, values in found.items():
            print(f"start {start + 1}, {name}: median {median(values):.4f}", flush=True)
            ratios[name] += values
    for name, values in ratios.items():
        spread = f"{min(values):.4f} to {max(values):.4f}"
        told = f"{median(values):.4f} ({spread}), {sides[0].name} over {sides[1].name}"
        print(f"{name}: median of {len(values)} pairs, {starts} starts: {told}")
    return ratios


def _compare_once(
    model: Path,
    order: tuple[Side, ...],
    sides: tuple[Side, Side],
    workloads: tuple[Workload, ...],
    pairs: int,
) -> dict[str, list[float]]:
    ratios: dict[str, list[float]] = {workload.name: [] for workload in workloads}
    with ExitStack() as stack:
        targets = []
        for side in order:
            server = stack.enter_context(BenchServer(side.name, model, *side.flags, root=side.root))
            stack.enter_context(ProcessTree(server.pid).paused())
            targets.append((server, HttpTarget(server.url, side.key, label=side.name)))
        for number in range(pairs + 1):
            for workload in workloads:
                rates = {}
                for server, target in targets:
                    with ProcessTree(server.pid).awake():
                        rates[target.label] = target.run(workload, number).tokens_per_second
                ratio = rates[sides[0].name] / rates[sides[1].name]
                told = ", ".join(f"{side.name} {rates[side.name]:.1f} tok/s" for side in sides)
                pair = f"pair {number}" if number else "warm-up"
                print(f"{pair}, {workload.name}: {told}, ratio {ratio:.4f}", flush=True)
                ratios[workload.name] += [ratio] if number else []
            targets.reverse()  # nobody is always first
    return ratios
