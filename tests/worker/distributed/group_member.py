"""What each process of `test_parallel` does; in a module of its own so that it can be spawned."""

from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from kernels.native.library import native_library
from tests.patience import PATIENCE
from worker.distributed.communicator import Communicator
from worker.distributed.parallel import TorchGroup, join_group
from worker.distributed.shared_group import SharedGroup
from worker.distributed.socket_group import SocketGroup
from worker.errors import GroupBroken

WIDTHS = (3, 2, 2)
SECRET = b"of a group of ranks"


@dataclass(frozen=True)
class Findings:
    """What one rank got from one group."""

    sums: list[torch.Tensor]
    gathered: torch.Tensor | None
    large: torch.Tensor  # a sum of many segments
    failure: str | None  # how a sum failed after the others had left


def part_of(rank: int, dtype: torch.dtype = torch.float32, num_rows: int = 5) -> torch.Tensor:
    """Return values whose sum depends on its order."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(num_rows, 7, generator=generator) * 10.0 ** (3 * rank)).to(dtype)


def run_member(addresses: tuple[str, ...], rank: int, size: int, pipe: Connection) -> None:
    """Use a group of torch's and two of our own; stay alive until killed."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        torchs = TorchGroup(addresses[0], rank=rank, size=size, device="cpu", timeout=PATIENCE)
        findings = [_use(torchs)]
        del torchs
        host, _, port = addresses[1].removeprefix("tcp://").partition(":")
        findings.append(_use(SocketGroup((host, int(port)), rank, size, 20.0, SECRET)))
        joined = join_group(addresses[2], rank, size, "cpu", 20.0, SECRET)
        assert isinstance(joined, SocketGroup if native_library() is None else SharedGroup)
        findings.append(_use(joined))
    pipe.send([(f.sums, f.gathered, f.large, f.failure) for f in findings])
    pipe.recv()


def _use(group: Communicator) -> Findings:
    """Sum, gather, then leave: rank 0 sees how its next sum fails."""
    rank = group.rank
    sums = [group.all_reduce(part_of(rank, dtype)) for dtype in (torch.float32, torch.bfloat16)]
    gathered = group.gather_first(part_of(rank)[:, : WIDTHS[rank]], WIDTHS[: group.size])
    large = group.all_reduce(part_of(rank, num_rows=100_000))[::999].clone()
    failure = None
    if rank == 0:
        try:
            group.all_reduce(part_of(rank))
        except GroupBroken as error:
            failure = str(error)
    group.close()
    return Findings(sums, gathered, large, failure)
