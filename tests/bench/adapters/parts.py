"""Where each millisecond of a cold adapter goes: the parts of a load, one by one, in one process.

First as plain functions, then what Ray adds. `python -m tests.bench.adapters --only parts` shows
them. Files are in the page cache, and nothing else runs.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch

from cluster.adapters.adapter import adapter_digest
from cluster.adapters.peft.checks import (
    CONFIG,
    WEIGHTS,
    AdapterLimits,
    build_adapter,
    check_layout,
)
from cluster.adapters.peft.reader import AdapterReader
from cluster.adapters.records import Source
from cluster.adapters.sharding import cut_all
from tests.bench.adapters.directories import adapter_names
from worker.lora.adapter_loader import build_adapter_weights
from worker.lora.shard import AdapterShard
from worker.model_config import ModelConfig
from worker.weights.partition import partition

T = TypeVar("T")
Times = dict[str, list[float]]  # seconds by part

NUM_WARM_UP = 4  # adapters that do not count


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a load."""

    name: str
    times: tuple[float, ...]  # seconds

    @property
    def median(self) -> float:
        """The middle one, in seconds."""
        return median(self.times)


class _Clock:
    """Collects how long each part took."""

    def __init__(self) -> None:
        self.times: Times = defaultdict(list)

    def time(self, part: str, work: Callable[[], T]) -> T:
        begun = perf_counter()
        result = work()
        self.times[part].append(perf_counter() - begun)
        return result


class Receiver:
    """An actor that is handed shards and does nothing with them."""

    def nothing(self) -> int:
        """Answer."""
        return 0

    def take(self, shard: AdapterShard) -> int:
        """Answer once the shard is here."""
        return shard.data.nbytes


def measure_parts(directory: Path, model: ModelConfig, tp: int, count: int) -> list[Part]:
    """Return the parts in their order, of `count` adapters each; loads go to rank 0 of `tp`."""
    clock, shards = _Clock(), []
    reader = AdapterReader(model, AdapterLimits())
    for name in adapter_names(NUM_WARM_UP + count):
        shards.append(_load(directory / name, model, tp, reader, clock))
    _pass_on(shards, clock)
    return [Part(name, tuple(times[NUM_WARM_UP:])) for name, times in clock.times.items()]


def _load(
    path: Path, model: ModelConfig, tp: int, reader: AdapterReader, clock: _Clock
) -> AdapterShard:
    """Do by itself each thing that loading one adapter takes."""
    source = Source(str(path))
    config = (path / CONFIG).read_bytes()
    weights = clock.time("read the file", (path / WEIGHTS).read_bytes)
    size = 8 + int.from_bytes(weights[:8], "little")
    head, payload = weights[:size], weights[size:]
    layout = clock.time(
        "check config and header, once for a recipe",
        lambda: check_layout(config, head, len(payload), model, AdapterLimits()),
    )
    reader.outline(source)
    clock.time("whole adapter of a known recipe", lambda: reader.whole(source))
    begun = perf_counter()
    adapter = build_adapter(str(path), layout, payload, model)
    whole = perf_counter() - begun
    clock.time("  digest", lambda: adapter_digest(adapter.dtype, adapter.modules, adapter.tables))
    clock.times["  finite values"].append(whole - clock.times["  digest"][-1])
    shards = clock.time("cut for all ranks", lambda: cut_all(adapter, tp))
    clock.time(
        "build the weights of one rank",
        lambda: build_adapter_weights(
            adapter.digest,
            (1.0,),
            shards[:1],
            partition(model, tp, 0),
            num_layers=model.num_layers,
            dtype=torch.float32,
            device=torch.device("cpu"),
            base=None,
        ),
    )
    return shards[0]


def _pass_on(shards: list[AdapterShard], clock: _Clock) -> None:
    """Hand shards to an actor, as the adapter pool does."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray  # reads both when it is imported

    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
    )

    def call(method: Any, *arguments: object) -> Any:
        return ray.get(method.remote(*arguments))

    try:
        receiver: Any = ray.remote(Receiver).remote()
        for shard in shards:
            handle = clock.time("Ray: put one shard", partial(ray.put, shard))
            clock.time("Ray: an actor call", partial(call, receiver.nothing))
            clock.time("Ray: the same with a shard", partial(call, receiver.take, handle))
    finally:
        ray.shutdown()
