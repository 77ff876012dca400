"""All-reduce over TCP: a group whose ranks are processes on CPUs, each connected to every other.

An exchange of small tensors takes tens of microseconds where gloo takes hundreds: each rank sends
its tensor to all others and sums what arrives itself. Ranks find each other through rank 0, whose
address they are told. Every connection begins with the group's secret, behind TLS where the host
has certificates (worker.transport.hello).
"""

import json
import select
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from worker.distributed.communicator import sum_in_pairs
from worker.errors import GroupBroken
from worker.transport.channel import BadFrame, ChannelClosed, receive, send
from worker.transport.hello import Connection, Door, connect

# A rank sends a segment to all before it reads one from all, so at most two segments of a rank are
# unread by another. Buffers for more than two mean that a send never waits for a rank that sends.
_SEGMENT_BYTES = 64 * 1024
_BUFFER_BYTES = 4 * _SEGMENT_BYTES
_RETRY_SECONDS = 0.02  # between two looks whether rank 0 is there
_Address = tuple[int, str, int]  # rank, host, port


class SocketGroup:
    """One rank of such a group."""

    def __init__(
        self, meeting: tuple[str, int], rank: int, size: int, timeout: float, secret: bytes
    ) -> None:
        """Connect to all other ranks.

        Args:
            meeting: (host, port) of rank 0, which listens there until all have come.
            rank: this rank.
            size: ranks in the group.
            timeout: seconds that any call, this one included, may wait for another rank.
            secret: that all ranks know, and nobody else.

        Raises:
            GroupBroken: if another rank does not come in time.
        """
        self.rank = rank
        self.size = size
        self.timeout = timeout
        try:
            self._peers = _connect(meeting, rank, size, timeout, secret)
        except (OSError, ChannelClosed, BadFrame) as error:
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
    meeting: tuple[str, int], rank: int, size: int, timeout: float, secret: bytes
) -> dict[int, Connection]:
    """Return a connection to every other rank: opened to lower ranks, accepted from higher."""
    if rank == 0:
        peers = _host_meeting(meeting, size, timeout, secret)
    else:
        peers = _join_meeting(meeting, rank, size, timeout, secret)
    for connection in peers.values():
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    return dict(sorted(peers.items()))


def _host_meeting(
    meeting: tuple[str, int], size: int, timeout: float, secret: bytes
) -> dict[int, Connection]:
    """Let all other ranks come, and tell each of them where the others listen."""
    peers: dict[int, Connection] = {}
    addresses: list[_Address] = []
    with socket.create_server(meeting) as server:
        server.settimeout(timeout)
        with Door(server, secret) as door:
            while len(peers) < size - 1:
                connection = door.accept()
                connection.settimeout(timeout)
                (said,) = _decode_addresses(receive(connection))
                if not 0 < said[0] < size or said[0] in peers:
                    raise BadFrame(f"rank {said[0]} has come twice, or is none of {size}")
                peers[said[0]] = connection
                addresses.append(said)
    everyone = json.dumps(sorted(addresses)).encode()
    for connection in peers.values():
        send(connection, everyone)
    return peers


def _join_meeting(
    meeting: tuple[str, int], rank: int, size: int, timeout: float, secret: bytes
) -> dict[int, Connection]:
    """Go to rank 0, and from there to the others."""
    first = _connect_when_there(meeting, secret, timeout)
    own_host = address_towards(*meeting)
    with socket.create_server((own_host, 0)) as server:
        server.settimeout(timeout)
        own = (rank, own_host, server.getsockname()[1])
        send(first, json.dumps([own]).encode())
        peers = {0: first}
        for other, host, port in _decode_addresses(receive(first)):
            if other < rank:
                peers[other] = connect((host, port), secret, timeout)
                send(peers[other], str(rank).encode())
        with Door(server, secret) as door:
            for _ in range(rank + 1, size):
                connection = door.accept()
                connection.settimeout(timeout)
                peers[int(receive(connection))] = connection
    return peers


def _decode_addresses(data: bytes) -> list[_Address]:
    """Return the addresses in a frame of another rank.

    Raises:
        BadFrame: if it holds something else.
    """
    try:
        return [(int(rank), str(host), int(port)) for rank, host, port in json.loads(data)]
    except (ValueError, TypeError) as error:
        raise BadFrame(f"no addresses of ranks: {error}") from error


def address_towards(host: str, port: int) -> str:
    """Return this host's own address on its route to another; sends nothing."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        own: str = probe.getsockname()[0]
    return own


def _connect_when_there(meeting: tuple[str, int], secret: bytes, timeout: float) -> Connection:
    """Connect to rank 0, which may not listen yet."""
    end = time.monotonic() + timeout
    while True:
        try:
            return connect(meeting, secret, timeout)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(_RETRY_SECONDS)


def _bytes_of(x: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return x.view(-1).view(torch.uint8).numpy().data


def _fill(connection: Connection, target: memoryview) -> None:
    """Receive as many bytes as `target` holds."""
    while target:
        received = connection.recv_into(target)
        if received == 0:
            raise ConnectionResetError("connection closed by another rank")
        target = target[received:]
