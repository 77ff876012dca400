"""Two servers on one machine, asked in turn while the other one's processes stand still.

Two servers of one tree may differ by where their memory lies, for as long as they run: they are
started anew several times, each time the other one first. Speeds are compared pair by pair, since
a machine's own speed drifts. Where another's work takes turns with it, wall time tells little: so
tokens for a second of the CPU that a server's processes took are compared as well, and what a token
cost each kind of process is told.
"""

from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

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


class Speeds(NamedTuple):
    """Tokens for a second of time, and for one of CPU time; or one side's over the other's."""

    wall: float
    cpu: float


@dataclass(slots=True)
class Cost:
    """What kinds of processes took for some tokens."""

    seconds: dict[str, float] = field(default_factory=dict)  # by what processes call themselves
    tokens: float = 0.0

    def add(self, seconds: dict[int, float]) -> None:
        """Add what was taken, by pid."""
        for pid, taken in seconds.items():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                first, _, _ = Path(f"/proc/{pid}/cmdline").read_text().partition("\0")
                title = Path(first).name.strip()
                self.seconds[title] = self.seconds.get(title, 0.0) + taken

    def told(self) -> str:
        """Return the milliseconds of each kind for a token, the largest first."""
        return ", ".join(
            f"{title} {1e3 * seconds / self.tokens:.3f}"
            for title, seconds in sorted(self.seconds.items(), key=lambda item: -item[1])
            if seconds > 0
        )


def compare(
    model: Path, sides: tuple[Side, Side], workloads: tuple[Workload, ...], starts: int, pairs: int
) -> None:
    """Print, by workload, how fast the first side is over the second: every pair, and medians.

    Each start of both begins with a pair that does not count.
    """
    ratios: dict[str, list[Speeds]] = {workload.name: [] for workload in workloads}
    costs = {side.name: Cost() for side in sides}
    for start in range(starts):
        order = sides if start % 2 == 0 else sides[::-1]
        for name, found in _compare_once(model, order, sides, workloads, pairs, costs).items():
            medians = Speeds(*map(median, zip(*found, strict=True)))
            told = f"median {medians.wall:.4f}, by CPU time {medians.cpu:.4f}"
            print(f"start {start + 1}, {name}: {told}", flush=True)
            ratios[name] += found
    for name, found in ratios.items():
        print(f"{name}, {sides[0].name} over {sides[1].name}, {len(found)} pairs:")
        for what, values in zip(("second", "second of CPU"), zip(*found, strict=True), strict=True):
            spread = f"{min(values):.4f} to {max(values):.4f}"
            print(f"  tokens for a {what}: median {median(values):.4f} ({spread})")
    for name, cost in costs.items():
        print(f"{name}, CPU milliseconds for a token: {cost.told()}")


def _compare_once(
    model: Path,
    order: tuple[Side, ...],
    sides: tuple[Side, Side],
    workloads: tuple[Workload, ...],
    pairs: int,
    costs: dict[str, Cost],
) -> dict[str, list[Speeds]]:
    ratios: dict[str, list[Speeds]] = {workload.name: [] for workload in workloads}
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
                    cost = costs[target.label] if number else Cost()
                    processes = ProcessTree(server.pid)
                    rates[target.label] = _rates(processes, target, workload, number, cost)
                first, second = (rates[side.name] for side in sides)
                ratio = Speeds(first.wall / second.wall, first.cpu / second.cpu)
                told = ", ".join(f"{side.name} {rates[side.name].wall:.1f} tok/s" for side in sides)
                pair = f"pair {number}" if number else "warm-up"
                print(
                    f"{pair}, {workload.name}: {told}, ratio {ratio.wall:.4f}, "
                    f"by CPU time {ratio.cpu:.4f}",
                    flush=True,
                )
                ratios[workload.name] += [ratio] if number else []
            targets.reverse()  # nobody is always first
    return ratios


def _rates(
    processes: ProcessTree, target: HttpTarget, workload: Workload, number: int, cost: Cost
) -> Speeds:
    """Return a server's tokens for a second, and for one of all its processes' CPU time."""
    with processes.awake():
        before = processes.cpu_seconds()
        result = target.run(workload, number)
        used = {pid: t - before.get(pid, 0.0) for pid, t in processes.cpu_seconds().items()}
        cost.add(used)
    tokens = result.tokens_per_second * result.seconds
    cost.tokens += tokens
    return Speeds(result.tokens_per_second, tokens / sum(used.values()))
