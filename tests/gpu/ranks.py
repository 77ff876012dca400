"""Ranks that are processes on one device and talk by gloo.

Gloo sums on the host: what it sums goes there and back, which is slow and right. Nothing here may
import Triton before a process has been prepared.
"""

import multiprocessing
import socket
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from tests.gpu.place import Place, prepare
from worker.distributed.parallel import TorchGroup

_TIMEOUT = 120.0  # seconds; a rank compiles kernels while the other waits


class HostGroup:
    """A group whose ranks sum on the host what lies on a device."""

    def __init__(self, group: TorchGroup) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `worker.distributed.communicator.Communicator`."""
        return self._group.all_reduce(x.float().cpu()).to(x.device)

    def gather_first(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """See `worker.distributed.communicator.Communicator`."""
        whole = self._group.gather_first(x.cpu(), widths)
        return None if whole is None else whole.to(x.device)

    def close(self) -> None:
        """See `worker.distributed.communicator.Communicator`."""
        self._group.close()


def run_ranks(place: Place, dtype: torch.dtype, qk_norm: bool, size: int) -> list[Tensor]:
    """Return what rank 0 found in each step of the script."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(
            target=_run_rank,
            args=(place.is_dry, address, rank, size, dtype, qk_norm, writer),
            daemon=True,
        )
        for rank, (_, writer) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        answers = []
        for rank, (reader, _) in enumerate(pipes):
            if not reader.poll(2 * _TIMEOUT):
                raise TimeoutError(f"rank {rank} did not answer")
            answers.append(reader.recv())
    finally:
        for process in processes:
            process.join(5.0)
            process.kill()
    failures = [answer for answer in answers if isinstance(answer, str)]
    if failures:
        raise RuntimeError("; ".join(failures))
    return [torch.from_numpy(logits) for logits in answers[0]]


def _run_rank(
    is_dry: bool,
    address: str,
    rank: int,
    size: int,
    dtype: torch.dtype,
    qk_norm: bool,
    answer: Connection,
) -> None:
    place = prepare(is_dry)
    from tests.gpu.rank_run import run_script
    from tests.gpu.script import make_script

    try:
        group = HostGroup(TorchGroup(address, rank, size, "cpu", _TIMEOUT))
        script = make_script(dtype, is_dry, qk_norm)
        found = run_script(place, script, group, deterministic=False, with_graphs=False)
        answer.send([None if logits is None else logits.numpy() for logits in found])
    except Exception as error:  # whatever it is, the other process has to hear of it
        traceback.print_exc()
        answer.send(f"rank {rank}: {type(error).__name__}: {error}")
