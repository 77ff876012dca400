"""What it costs to have thousands of adapters registered, and to use them.

Two servers differ only in how many adapters they have. Both run; they are asked in turns, and how
much CPU the idle one uses meanwhile is told with the results.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from deploy.bench.http_target import HttpTarget
from deploy.bench.workload import Run, Workload
from tests.bench.adapters.popularity import by_zipf, in_turn
from tests.bench.adapters.server import BenchServer, cpu_used

FEW = 5  # adapters of the smaller server
EXPONENT = 1.1
CONCURRENCY, INPUT_LEN, OUTPUT_LEN = 8, 64, 32


@dataclass(frozen=True, slots=True)
class Start:
    """How long one start of a server took, in seconds."""

    num_adapters: int
    registered: float  # from the start of the process
    ready: float


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a workload on a server."""

    tokens_per_second: float
    requests_per_second: float
    ttft_p50: float  # seconds
    ttft_p99: float
    loads_per_second: float  # into slots
    hits: float  # share of requests that needed no load
    counted: dict[str, float]  # growth of every counter of adapters
    idle_cpu: float | None  # of the other server, percent of one core


@dataclass(slots=True)
class Row:
    """All counted rounds of one workload on one server."""

    workload: str
    num_adapters: int  # registered
    rounds: list[Round] = field(default_factory=list)
    tiers: dict[str, int] = field(default_factory=dict)  # where adapters are after the last round

    def median(self, what: Callable[[Round], float]) -> float:
        """Return the median of a figure over the rounds."""
        return median(map(what, self.rounds))


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyOptions:
    """How much is measured."""

    names: tuple[str, ...]  # of all adapters of the larger server; the smaller has the first FEW
    vocab_size: int
    rounds: int
    num_requests: int  # in a round


def workload(kind: str, options: ManyOptions, number: int) -> Workload:
    """Return the workload of one round: `few`, `zipf` or `in turn`; no two rounds are alike."""
    count = options.num_requests
    if kind == "few":
        picks = in_turn(FEW, count, start=0)
    elif kind == "zipf":
        picks = by_zipf(len(options.names), count, exponent=EXPONENT, seed=f"round {number}")
    else:
        assert kind == "in turn", f"no such workload: {kind}"
        picks = in_turn(len(options.names), count, start=number * count)
    return Workload(
        name=kind,
        models=tuple(options.names[pick] for pick in picks),
        concurrency=CONCURRENCY,
        num_requests=count,
        input_len=INPUT_LEN,
        output_len=OUTPUT_LEN,
        vocab_size=options.vocab_size,
    )


def measure_starts(
    open_server: Callable[[int], BenchServer],
    sizes: tuple[int, ...],
    rounds: int,
    told: Callable[[str], None],
) -> list[Start]:
    """Start servers with so many adapters, one at a time, after a round that does not count."""
    starts = []
    for number in range(rounds + 1):
        for size in sizes:
            told(f"start-up with {size} adapters, {'warm-up' if number == 0 else number}")
            with open_server(size) as server:
                if number > 0:
                    starts.append(Start(size, server.registered_after, server.ready_after))
    return starts


def measure_registered(
    few: BenchServer, many: BenchServer, options: ManyOptions, told: Callable[[str], None]
) -> list[Row]:
    """Measure the same workload on both servers in turns, after a round that does not count."""
    rows = [Row("few", FEW), Row("few", len(options.names))]
    sides = [(rows[0], few, many), (rows[1], many, few)]
    for number in range(options.rounds + 1):
        for row, server, other in sides:
            told(f"{row.workload} of {row.num_adapters}: {_label(number)}")
            _measure(row, server, options, number, other)
        sides.reverse()  # nobody is always first
    return rows


def measure_used(many: BenchServer, options: ManyOptions, told: Callable[[str], None]) -> list[Row]:
    """Measure workloads over all adapters of one server, after a round that does not count."""
    rows = [Row(kind, len(options.names)) for kind in ("zipf", "in turn")]
    for number in range(options.rounds + 1):
        for row in rows:
            told(f"{row.workload} of {row.num_adapters}: {_label(number)}")
            _measure(row, many, options, number, None)
    return rows


def _label(number: int) -> str:
    return "warm-up" if number == 0 else f"round {number}"


def _measure(
    row: Row, server: BenchServer, options: ManyOptions, number: int, other: BenchServer | None
) -> None:
    load, target = workload(row.workload, options, number), HttpTarget(server.url)
    counts = server.counts()
    cpu, began = None if other is None else other.cpu_seconds(), time.perf_counter()
    run = target.run(load, number)
    idle = None
    if other is not None and cpu is not None:
        seconds = time.perf_counter() - began
        idle = 100 * cpu_used(cpu, other.cpu_seconds()) / seconds
    after = server.counts()
    if number > 0:
        row.rounds.append(_round(run, after.loads - counts.loads, after.since(counts), idle))
        row.tiers = server.tiers()


def _round(run: Run, loads: int, counted: dict[str, float], idle: float | None) -> Round:
    return Round(
        tokens_per_second=run.tokens_per_second,
        requests_per_second=len(run.samples) / run.seconds,
        ttft_p50=run.first_token(50),
        ttft_p99=run.first_token(99),
        loads_per_second=loads / run.seconds,
        hits=1 - loads / len(run.samples),
        counted=counted,
        idle_cpu=idle,
    )
