"""The adapters that are served: made once, kept in the cache, and how much memory they take.

Adapter i is called the same and holds the same bytes in every directory, whatever their number.
"""

import os
from pathlib import Path

from cluster.adapters.peft.checks import WEIGHTS, AdapterLimits
from cluster.adapters.peft.reader import read_adapter
from cluster.adapters.sharding import cut_all
from deploy.demo.many_adapters import make_many
from worker.model_config import ModelConfig

CACHE = Path.home() / ".cache" / "topwork" / "bench"
NUM_KINDS = 4  # the demo adapters that all others are made of, in turn


def adapter_directory(count: int) -> Path:
    """Return a directory of `count` adapters; what is missing is made, 15 ms and 2 MB each."""
    directory = CACHE / f"adapters-{count}"
    make_many(directory, count)
    return directory


def adapter_names(count: int) -> tuple[str, ...]:
    """Return the names of the adapters in a directory of so many."""
    return tuple(f"a{number:04d}" for number in range(count))


def mean_shard_bytes(directory: Path, model: ModelConfig, tp: int) -> int:
    """Return the bytes of the shards of all ranks together, mean of one adapter of each kind.

    More than its file from two ranks on, because every rank has all of some matrices.
    """
    total = 0
    for name in adapter_names(NUM_KINDS):
        adapter = read_adapter(directory / name, model, AdapterLimits())
        total += sum(shard.data.nbytes for shard in cut_all(adapter, tp))
    return total // NUM_KINDS


def drop_from_page_cache(directory: Path) -> None:
    """Make the next reader of an adapter's tensors wait for the disk.

    A hint to the kernel, which keeps pages that are not on the disk yet.
    """
    opened = os.open(directory / WEIGHTS, os.O_RDONLY)
    try:
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(opened)
