"""A group whose ranks are threads of one process: for the engine without Ray, and for tests.

Every call is one barrier, which a failing thread breaks for all.
"""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from worker.distributed.communicator import sum_in_pairs
from worker.errors import GroupBroken


class ThreadGroup:
    """What the threads share; each gets one of `communicators`."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout)
        self._empty: Tensor = torch.empty(0)
        # Two sets of buffers, used in turn: a rank can only be back at a set after the barrier of
        # the other one, and by then every rank has read it. So one barrier a call is enough.
        self._buffers = ([self._empty] * size, [self._empty] * size)

    def communicators(self) -> "tuple[ThreadRank, ...]":
        """Return the communicator of each rank, in rank order."""
        return tuple(ThreadRank(self, rank) for rank in range(self.size))

    def exchange(self, rank: int, turn: int, x: Tensor) -> list[Tensor]:
        """Return what every rank brought to this exchange, in rank order; not to be changed."""
        buffers = self._buffers[turn % 2]
        buffers[rank] = x
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise GroupBroken("a rank failed or did not come in time") from error
        return list(buffers)

    def close(self) -> None:
        """Wake every rank that waits, now and later, with `GroupBroken`."""
        self._barrier.abort()


class ThreadRank:
    """One rank of a `ThreadGroup`."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank = rank
        self.size = group.size
        self._group = group
        self._turn = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, in pairs.

        A copy is shown to the others, who may read it when the caller has `x` back already.
        """
        return sum_in_pairs(self._exchange(x.clone()))

    def gather_first(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Return the ranks' columns side by side on rank 0."""
        assert x.shape[1] == widths[self.rank], f"width {x.shape[1]} is not {widths[self.rank]}"
        parts = self._exchange(x)
        return torch.cat(parts, dim=1) if self.rank == 0 else None

    def close(self) -> None:
        """Break the whole group."""
        self._group.close()

    def _exchange(self, x: Tensor) -> list[Tensor]:
        parts = self._group.exchange(self.rank, self._turn, x)
        self._turn += 1
        return parts
