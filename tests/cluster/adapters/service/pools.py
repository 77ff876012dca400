"""Adapter directories for tests of the pool actor."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cluster.adapters.service.pool_actor import AdapterPoolActor
from cluster.adapters.sharding import cut_all
from tests.cluster.adapters.tiny import tiny_adapter
from tests.patience import PATIENCE

Make = Callable[..., AdapterPoolActor]


def write(folder: Path, content: int) -> Path:
    """Write one of many adapters of equal size; equal contents have equal bytes."""
    return tiny_adapter("q_proj", "v_proj", seed=content).write(folder)


def spoil(folder: Path) -> None:
    """Put a NaN into the tensors of a directory."""
    adapter = tiny_adapter("q_proj", "v_proj")
    next(iter(adapter.tensors.values()))[0, 0] = np.nan
    adapter.write(folder)


def size() -> int:
    """Return what the only shard of an adapter of `write` holds in memory."""
    adapter = tiny_adapter("q_proj", "v_proj")
    with tempfile.TemporaryDirectory() as folder:
        (shard,) = cut_all(adapter.read(Path(folder)), 1)
    return shard.data.nbytes


def digest_of(folder: Path, content: int) -> str:
    """Return the digest of a content."""
    shutil.rmtree(folder / "scratch", ignore_errors=True)
    return tiny_adapter("q_proj", "v_proj", seed=content).read(folder / "scratch").digest


async def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.005)


async def calm() -> None:
    """Let everything happen that can without a thread."""
    for _ in range(20):
        await asyncio.sleep(0)
