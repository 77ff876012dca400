"""Tensor parallelism: how a rank joins its group, and the group over torch.distributed.

All-reduce and gather go over NCCL between GPUs; on CPUs over shared memory, or over TCP where the
ranks cannot share any (`TorchGroup` over gloo is the reference for both). Owns the choice and all
that is torch.distributed's; the other transports are the modules beside this one.
"""

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from worker.distributed.communicator import Communicator, SingleRank, sum_in_pairs, summed_as
from worker.distributed.shared_group import share_memory
from worker.distributed.socket_group import SocketGroup, address_towards
from worker.errors import GroupBroken


def join_group(
    address: str, rank: int, size: int, device: str, timeout: float, secret: bytes
) -> Communicator:
    """Join the group of processes that meets at `address` by the fastest way for its devices.

    The arguments are those of `TorchGroup`, and a secret that all ranks know: on CPUs nobody else
    gets into the group. NCCL's connections know neither secrets nor TLS.

    Raises:
        GroupBroken: if the others do not come in time.
    """
    if size == 1:
        return SingleRank()
    if torch.device(device).type == "cuda":
        return TorchGroup(address, rank, size, device, timeout)
    return share_memory(SocketGroup(_host_and_port(address), rank, size, timeout, secret))


class _Backend(Protocol):
    """What torch's process groups have in common; their stubs leave it out."""

    def allreduce(self, tensors: list[Tensor]) -> dist.Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> dist.Work: ...

    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: dist.GatherOptions
    ) -> dist.Work: ...

    def abort(self) -> None: ...


class TorchGroup:
    """Ranks that are processes: NCCL between GPUs, gloo otherwise.

    Holds its own process group, not torch's global one, so that gloo can be bound to the address
    that this host uses towards the store instead of whatever its host name resolves to.
    """

    def __init__(self, address: str, rank: int, size: int, device: str, timeout: float) -> None:
        """Join the group; returns when all ranks are there.

        Args:
            address: tcp://host:port of the store, which rank 0 opens.
            rank: this rank.
            size: ranks in the group.
            device: "cpu", or "cuda" with an index or for the first that this process sees.
            timeout: seconds that any call, this one included, may wait for the other ranks.

        Raises:
            GroupBroken: if the others do not come in time.
        """
        self.rank = rank
        self.size = size
        limit = timedelta(seconds=timeout)
        host, port = _host_and_port(address)
        try:
            self._store = _store(host, port, rank, size, limit)
            if torch.device(device).type == "cuda":
                self._group: _Backend | None = _nccl(
                    self._store, rank, size, torch.device(device), limit
                )
            else:
                own_address = address_towards(host, port)
                self._group = _gloo(self._store, rank, size, own_address, limit)
        except (OSError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
            raise GroupBroken(f"rank {rank} could not join {address}: {error}") from error

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, in pairs.

        Two numbers have one sum, so a plain all-reduce will do for two ranks. With more, its order
        depends on where in the tensor an element lies, so it is replaced by gathering and adding.
        """
        if self.size == 2:
            total = summed_as(x).contiguous()
            self._wait(self._joined().allreduce([total]))
            return total
        return sum_in_pairs(self._gather(x.contiguous()))

    def gather_first(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Return the ranks' columns side by side on rank 0."""
        width = max(widths)
        padded = F.pad(x, (0, width - x.shape[1])) if x.shape[1] < width else x.contiguous()
        parts = [torch.empty_like(padded) for _ in widths] if self.rank == 0 else []
        self._wait(self._joined().gather([parts] if parts else [], [padded], dist.GatherOptions()))
        if self.rank > 0:
            return None
        return torch.cat([part[:, :w] for part, w in zip(parts, widths, strict=True)], dim=1)

    def close(self) -> None:
        """End the connections, which peers notice at once."""
        if self._group is not None:
            self._group.abort()  # NCCL's way; gloo ends its connections when it is dropped
            self._group = None

    def _joined(self) -> _Backend:
        if self._group is None:
            raise GroupBroken(f"rank {self.rank} has left its group")
        return self._group

    def _gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._wait(self._joined().allgather([parts], [x]))
        return parts

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise GroupBroken(f"rank {self.rank} lost its group: {error}") from error


def _host_and_port(address: str) -> tuple[str, int]:
    url = urlsplit(address)
    assert url.scheme == "tcp" and url.hostname and url.port, f"not tcp://host:port: {address}"
    return url.hostname, url.port


def _store(host: str, port: int, rank: int, size: int, limit: timedelta) -> Store:
    """Return the store where ranks find each other; rank 0 opens it, on `host` alone."""
    if rank > 0:
        return TCPStore(host, port, size, False, timeout=limit)
    # Given only a port, TCPStore would listen on every interface.
    server = socket.create_server((host, port))
    return TCPStore(
        host, port, size, True, timeout=limit, master_listen_fd=server.detach(), use_libuv=True
    )


def _gloo(store: Store, rank: int, size: int, own: str, limit: timedelta) -> _Backend:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = limit
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
    return cast(_Backend, dist.ProcessGroupGloo(store, rank, size, options))


def _nccl(store: Store, rank: int, size: int, device: torch.device, limit: timedelta) -> _Backend:
    torch.cuda.set_device(device.index or 0)  # Ray shows each rank its own GPU alone, without index
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return cast(_Backend, dist.ProcessGroupNCCL(store, rank, size, options))
