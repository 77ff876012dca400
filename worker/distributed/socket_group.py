"""All-reduce over TCP: a group whose ranks are processes on CPUs, each connected to every other.

An exchange of small tensors takes tens of microseconds where gloo takes hundreds: each rank sends
its tensor to all others and sums what arrives itself. Ranks find each other by a store of keys and
values that the caller gives.
"""

import secrets
import select
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from worker.channel import BadFrame, ChannelClosed, accept, receive, send
from worker.distributed.communicator import sum_in_pairs
from worker.errors import GroupBroken

# A rank sends a segment to all before it reads one from all, so at most two segments of a rank are
# unread by another. Buffers for more than two mean that a send never waits for a rank that sends.
_SEGMENT_BYTES = 64 * 1024
_BUFFER_BYTES = 4 * _SEGMENT_BYTES


class Store(Protocol):
    """Keys and values that all ranks see; `get` waits until the key is set."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class SocketGroup:
    """One rank of such a group."""

    def __init__(self, store: Store, rank: int, size: int, own_host: str, timeout: float) -> None:
        """Connect to all other ranks.

        Args:
            store: where the ranks tell each other their addresses.
            rank: this rank.
            size: ranks in the group.
            own_host: the address of this host at which the others reach it.
            timeout: seconds that any call, this one included, may wait for another rank.

        Raises:
            GroupBroken: if another rank does not come in time.
        """
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._store = store  # may live in this process, and others may still need it
        try:
            self._peers = _connect(store, rank, size, own_host, timeout)
        except (OSError, RuntimeError, ChannelClosed, BadFrame) as error:
            raise GroupBroken(f"rank {rank} could not join: {error}") from error
        self._rank_by_file = {peer.fileno(): other for other, peer in self._peers.items()}
        self._poll = select.poll()
        for file in self._rank_by_file:
            self._poll.register(file, select.POLLIN)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, in pairs."""
        x = x.contiguous()
        parts = [x if rank == self.rank else torch.empty_like(x) for rank in range(self.size)]
        self._exchange(x, {rank: parts[rank] for rank in self._peers})
        return sum_in_pairs(parts)

    def gather_first(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Return the ranks' columns side by side on rank 0."""
        x = x.contiguous()
        if self.rank > 0:
            with _failing_as_group(self.rank):
                self._peers[0].sendall(_bytes_of(x))
            return None
        parts = [x, *(x.new_empty(x.shape[0], width) for width in widths[1:])]
        with _failing_as_group(self.rank):
            for rank, peer in self._peers.items():
                _fill(peer, _bytes_of(parts[rank]))
        return torch.cat(parts, dim=1)

    def all_gather_text(self, text: str) -> list[str]:
        """Return every rank's text, in rank order."""
        texts = {self.rank: text}
        with _failing_as_group(self.rank):
            for peer in self._peers.values():
                send(peer, text.encode())
            for rank, peer in self._peers.items():
                texts[rank] = receive(peer).decode(errors="replace")
        return [texts[rank] for rank in range(self.size)]

    def lost_ranks(self, wait: float) -> list[int]:
        """Return the ranks that have left or died, after at most `wait` seconds if there are none.

        Only between calls of a group whose ranks send nothing over their connections meanwhile.
        """
        return [self._rank_by_file[file] for file, _ in self._poll.poll(wait * 1000.0)]

    def close(self) -> None:
        """End the connections, which the other ranks notice at once."""
        for peer in self._peers.values():
            peer.close()

    def _exchange(self, x: Tensor, others: dict[int, Tensor]) -> None:
        """Send `x` to every other rank and fill `others` with theirs, of the same size."""
        own = _bytes_of(x)
        incoming = {rank: _bytes_of(other) for rank, other in others.items()}
        with _failing_as_group(self.rank):
            for start in range(0, len(own), _SEGMENT_BYTES):
                stop = start + _SEGMENT_BYTES
                for peer in self._peers.values():
                    peer.sendall(own[start:stop])
                for rank, peer in self._peers.items():
                    _fill(peer, incoming[rank][start:stop])


@contextmanager
def _failing_as_group(rank: int) -> Iterator[None]:
    """Turn a failing connection into the end of the group."""
    try:
        yield
    except (OSError, ChannelClosed, BadFrame) as error:
        raise GroupBroken(f"rank {rank} lost its group: {error}") from error


def _connect(
    store: Store, rank: int, size: int, own_host: str, timeout: float
) -> dict[int, socket.socket]:
    """Return a connection to every other rank: opened to lower ranks, accepted from higher."""
    if rank == 0:
        store.set("secret", secrets.token_hex(32))
    peers: dict[int, socket.socket] = {}
    with socket.create_server((own_host, 0)) as server:
        server.settimeout(timeout)
        store.set(f"port/{rank}", f"{server.getsockname()[1]}")
        store.set(f"host/{rank}", own_host)
        secret = store.get("secret")
        for other in range(rank):
            address = store.get(f"host/{other}").decode(), int(store.get(f"port/{other}"))
            peers[other] = socket.create_connection(address, timeout)
            send(peers[other], secret)
            send(peers[other], str(rank).encode())
        for _ in range(rank + 1, size):
            connection = accept(server, secret)
            connection.settimeout(timeout)
            peers[int(receive(connection))] = connection
    for connection in peers.values():
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    return dict(sorted(peers.items()))


def _bytes_of(x: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return x.view(-1).view(torch.uint8).numpy().data


def _fill(connection: socket.socket, target: memoryview) -> None:
    """Receive as many bytes as `target` holds."""
    while target:
        received = connection.recv_into(target)
        if received == 0:
            raise ConnectionResetError("connection closed by another rank")
        target = target[received:]
