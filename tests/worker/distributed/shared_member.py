"""What each process of `test_shared_group` does; in a module of its own so that it can be started.

A task gets this rank's place and returns what the test looks at.
"""

import random
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from worker.distributed.communicator import Communicator, sum_in_pairs
from worker.distributed.parallel import join_group
from worker.errors import GroupBroken

Task = Callable[[Communicator], object]

SEGMENT = 65536  # float32 elements; two in bfloat16
NUM_CALLS = 1500


def run_member(
    address: str, rank: int, size: int, timeout: float, task: Task, pipe: Connection
) -> None:
    """Join, tell which kind of group it is, do the task and stay alive until killed."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        group = join_group(address, rank, size, "cpu", timeout, b"secret")
        pipe.send(type(group).__name__)
        pipe.send(task(group))
        pipe.recv()


def sum_many(group: Communicator) -> list[str]:
    """Return what was wrong in many sums and gathers of all sizes, some of them waited for."""
    values = [
        torch.randn(4 * SEGMENT, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
        for rank in range(group.size)
    ]
    draw, own = random.Random(5), random.Random(group.rank)
    failures = []
    for call in range(NUM_CALLS):
        if own.random() < 0.01:
            time.sleep(0.003)  # so long that C gives up and is called again
        dtype = draw.choice([torch.float32, torch.bfloat16])
        if draw.random() < 0.2:
            failures += _gather(group, values, draw, dtype)
            continue
        count = draw.choice([1, 15, 16, 17, 576, 4609, draw.randrange(3000)])
        if call % 50 == 0:
            count = draw.choice([SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT, 3 * SEGMENT + 5])
        start = draw.randrange(SEGMENT // 2)
        parts = [value[start : start + count].to(dtype).clone() for value in values]
        found = group.all_reduce(parts[group.rank].clone())
        if found.dtype != torch.float32 or not torch.equal(found, sum_in_pairs(parts)):
            failures.append(f"call {call}: sum of {count} {dtype}")
    return failures


def _gather(
    group: Communicator, values: list[torch.Tensor], draw: random.Random, dtype: torch.dtype
) -> list[str]:
    widths = [draw.choice([0, 1, 7, 300, 20000]) for _ in range(group.size)]
    num_rows = draw.choice([1, 3, 10])
    parts = [
        value[: num_rows * width].view(num_rows, width).to(dtype)
        for value, width in zip(values, widths, strict=True)
    ]
    found = group.gather_first(parts[group.rank], widths)
    if group.rank > 0:
        return [] if found is None else ["a gather gave another rank than 0 something"]
    assert found is not None
    is_right = found.dtype == dtype and torch.equal(found, torch.cat(parts, dim=1))
    return [] if is_right else [f"gather of {widths} {dtype}"]


def wait_for_the_last(group: Communicator) -> str:
    """Return how a sum failed that the last rank takes no part in."""
    group.all_reduce(torch.ones(5))
    if group.rank == group.size - 1:
        return "takes no part"
    try:
        group.all_reduce(torch.ones(5))
    except GroupBroken as error:
        return str(error)
    return "did not fail"


def look_around(group: Communicator) -> list[str]:
    """Return the names of the memory that this process shares with others."""
    group.all_reduce(torch.ones(5))
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return [fields[5] for fields in maps if "s" in fields[1]]
