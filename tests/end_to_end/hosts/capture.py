"""What passes over the wires of a network of hosts, recorded and put together again.

Owns the recording, by a raw socket at the switch, and the TCP streams in it.
"""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from tests.end_to_end.hosts.network import Network

_ALL_PROTOCOLS = 3  # of linux/if_ether.h
_RECEIVE_BUFFER_FORCE, _PACKET_LEVEL, _STATISTICS = 33, 263, 6
_BUFFER_BYTES = 256 * 1024 * 1024
_IP4, _TCP = 0x0800, 6
_TCP_SYN = 0x02
_SEQUENCE = 2**32

Flow = tuple[str, int, str, int]  # from where to where


@dataclass(frozen=True)
class Stream:
    """One direction of a TCP connection, as far as it was seen."""

    flow: Flow
    data: bytes
    has_begin: bool  # whether its first byte is in it


class Capture:
    """All frames that pass the switch while the context lasts."""

    def __init__(self, network: Network) -> None:
        with network.seen_from("switch"):
            self._socket = socket.socket(
                socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)
            )
        self._socket.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER_FORCE, _BUFFER_BYTES)
        self._socket.settimeout(0.2)
        self.frames: dict[bytes, None] = {}  # each is seen at two ports and more
        self.num_lost = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="capture")

    def __enter__(self) -> "Capture":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        statistics = self._socket.getsockopt(_PACKET_LEVEL, _STATISTICS, 8)
        _, self.num_lost = struct.unpack("II", statistics)
        self._socket.close()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                while True:
                    self.frames[self._socket.recv(1 << 17)] = None
            except TimeoutError:
                continue

    def streams(self) -> list[Stream]:
        """Return all TCP streams, put together."""
        parts: dict[Flow, dict[int, bytes]] = {}
        begins: dict[Flow, int] = {}
        for frame in self.frames:
            segment = _segment_of(frame)
            if segment is None:
                continue
            flow, sequence, flags, payload = segment
            if flags & _TCP_SYN:
                begins[flow] = (sequence + 1) % _SEQUENCE
            if payload:
                known = parts.setdefault(flow, {})
                known[sequence] = max(known.get(sequence, b""), payload, key=len)
        return [_joined(flow, known, begins.get(flow)) for flow, known in parts.items()]


def _segment_of(frame: bytes) -> tuple[Flow, int, int, bytes] | None:
    if struct.unpack_from(">H", frame, 12)[0] != _IP4 or frame[23] != _TCP:
        return None
    ip_bytes = (frame[14] & 15) * 4
    total = struct.unpack_from(">H", frame, 16)[0] or len(frame) - 14  # 0 where it was not cut
    start = 14 + ip_bytes
    source, target, sequence = struct.unpack_from(">HHI", frame, start)
    tcp_bytes = (frame[start + 12] >> 4) * 4
    addresses = (socket.inet_ntoa(frame[at : at + 4]) for at in (26, 30))
    flow = (next(addresses), source, next(addresses), target)
    return flow, sequence, frame[start + 13], frame[start + tcp_bytes : 14 + total]


def _joined(flow: Flow, parts: dict[int, bytes], begin: int | None) -> Stream:
    """Put the segments of a stream in order; what was sent twice is there once."""
    origin = next(iter(parts)) if begin is None else begin
    data = bytearray()
    at: int | None = None
    for offset, payload in sorted(
        ((sequence - origin + 2**31) % _SEQUENCE - 2**31, payload)
        for sequence, payload in parts.items()
    ):
        if offset < 0 and begin is not None:
            continue  # of an older connection with the same ports, or a keep-alive
        known = 0 if at is None else max(0, at - offset)
        data += payload[known:]
        at = max(offset + len(payload), at or offset)
    return Stream(flow, bytes(data), begin is not None)


@contextmanager
def captured(network: Network) -> Iterator[Capture]:
    """Record while the context lasts; all of it was seen."""
    with Capture(network) as capture:
        yield capture
    assert capture.num_lost == 0, f"{capture.num_lost} frames went by unseen"
    assert capture.frames, "a network that says nothing"
