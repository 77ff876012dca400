"""Which servers run when, and what is measured on them.

Owns how servers are set up.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from deploy.demo.model import DEFAULT_TARGET
from tests.bench.adapters.cold import ColdBench, ColdOptions
from tests.bench.adapters.directories import adapter_directory, adapter_names, mean_shard_bytes
from tests.bench.adapters.many import (
    FEW,
    ManyOptions,
    measure_registered,
    measure_starts,
    measure_used,
)
from tests.bench.adapters.parts import measure_parts
from tests.bench.adapters.report import Results, machine
from tests.bench.adapters.server import BenchServer
from tests.bench.adapters.stall import StallBench, StallOptions
from worker.model_config import ModelConfig
from worker.model_config_reader import read_model_config

Told = Callable[[str], None]  # hears what is going on


class What(StrEnum):
    """What can be measured."""

    START = "start"
    MANY = "many"
    STALL = "stall"
    COLD = "cold"
    PARTS = "parts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How every server runs."""

    tp: int
    num_adapters: int  # registered
    num_slots: int
    num_in_host: int  # adapters that host memory should have room for
    shard_bytes: int  # of one adapter, mean, all ranks together

    @property
    def host_bytes(self) -> int:
        """The budget of the host tier."""
        return self.num_in_host * self.shard_bytes

    def open_server(self, num_adapters: int) -> BenchServer:
        """Start a server with so many adapters registered."""
        return BenchServer(
            f"with {num_adapters} adapters",
            DEFAULT_TARGET,
            *("--tp", str(self.tp), "--max-loras", str(self.num_slots)),
            *("--host-adapter-memory", str(self.host_bytes)),
            *("--adapter-dir", str(adapter_directory(num_adapters))),
        )

    def told(self) -> dict[str, Any]:
        """Return what a reader must know of the servers."""
        return {
            "machine": machine(),
            "servers": f"tp {self.tp}, {(os.cpu_count() or 1) // self.tp or 1} threads each rank, "
            f"{self.num_slots} slots, {self.num_adapters:,} adapters registered",
            "host memory for adapters": f"{self.host_bytes:,} bytes = {self.num_in_host} x "
            f"{self.shard_bytes:,}, the mean of an adapter's shards for {self.tp} rank(s)",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much is measured."""

    rounds: int  # that count, of `many` and `stall`
    num_requests: int  # in a round of `many`
    samples: int  # of `cold` and `parts`
    load_only: bool
    drop_page_cache: bool


def make_setup(tp: int, num_adapters: int, num_slots: int, num_in_host: int) -> Setup:
    """Return a set-up; the adapters are made if they are not there."""
    directory = adapter_directory(num_adapters)
    os.sync()  # what is not on the disk yet cannot be dropped from the page cache
    return Setup(
        tp=tp,
        num_adapters=num_adapters,
        num_slots=num_slots,
        num_in_host=num_in_host,
        shard_bytes=mean_shard_bytes(directory, read_model_config(DEFAULT_TARGET), tp),
    )


def measure(what: set[What], setup: Setup, amount: Amount, told: Told) -> Results:
    """Measure what is wanted, each on fresh servers.

    Raises:
        BenchError: if a server does not do what it is asked.
    """
    results = Results(setup.told())
    model = read_model_config(DEFAULT_TARGET)
    if What.START in what:
        sizes = (FEW, setup.num_adapters)
        results.starts = measure_starts(setup.open_server, sizes, amount.rounds, told)
    if What.MANY in what:
        _measure_many(results, setup, amount, model, told)
    names, directory = adapter_names(setup.num_adapters), adapter_directory(setup.num_adapters)
    if What.STALL in what:
        stall = StallOptions(
            names=names,
            directory=directory,
            vocab_size=model.vocab_size,
            rounds=amount.rounds,
            load_only=amount.load_only,
            drop_page_cache=amount.drop_page_cache,
        )
        with setup.open_server(setup.num_adapters) as server:
            results.phases = StallBench(server, stall, told).run()
    if What.COLD in what:
        cold = ColdOptions(
            names=names,
            directory=directory,
            vocab_size=model.vocab_size,
            samples=amount.samples,
            num_slots=setup.num_slots,
            drop_page_cache=amount.drop_page_cache,
        )
        with setup.open_server(setup.num_adapters) as server:
            results.places = ColdBench(server, cold, told).run()
    if What.PARTS in what:
        told("the parts of a load")
        results.parts = measure_parts(directory, model, setup.tp, amount.samples)
    results.setup["load after"] = os.getloadavg()
    return results


def _measure_many(
    results: Results, setup: Setup, amount: Amount, model: ModelConfig, told: Told
) -> None:
    options = ManyOptions(
        names=adapter_names(setup.num_adapters),
        vocab_size=model.vocab_size,
        rounds=amount.rounds,
        num_requests=amount.num_requests,
    )
    with setup.open_server(setup.num_adapters) as many:
        with setup.open_server(FEW) as few:
            results.rows = measure_registered(few, many, options, told)
        results.rows += measure_used(many, options, told)
