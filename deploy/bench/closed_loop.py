"""Requests over plain sockets: what arrives is noted with its time, and read when all is over.

A client on the cores of the server that it measures takes from what it measures. So while requests
run nothing is done for a token but to take its bytes and to look at the clock. Owns the
connections, one for each request.
"""

import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

READ_BYTES = 2**14


@dataclass(slots=True)
class Recording:
    """All that came back for one request, and when; times in seconds of perf_counter."""

    sent: float
    parts: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of each part


def record(
    address: tuple[str, int], requests: Sequence[bytes], concurrency: int, patience: float
) -> list[Recording]:
    """Send all requests, `concurrency` of them side by side; return what came back, in order.

    Raises:
        httpx.TransportError: if the server cannot be reached, breaks a connection, or says nothing
            to anybody for `patience` seconds.
    """
    loop = _Loop(address, requests)
    try:
        loop.run(concurrency, patience)
    except OSError as error:
        raise httpx.ReadError(str(error)) from error
    finally:
        loop.close()
    return loop.recordings


class _Loop:
    def __init__(self, address: tuple[str, int], requests: Sequence[bytes]) -> None:
        self.recordings: list[Recording] = []
        self._address = address
        self._waiting = deque(requests)
        self._poll = select.epoll()
        self._open: dict[int, tuple[socket.socket, Recording]] = {}  # by file descriptor

    def run(self, concurrency: int, patience: float) -> None:
        for _ in range(min(concurrency, len(self._waiting))):
            self._send_next()
        while self._open:
            ready = self._poll.poll(patience)
            if not ready:
                raise httpx.ReadTimeout(f"silent for {patience:g} s")
            for descriptor, _ in ready:
                connection, recording = self._open[descriptor]
                part = connection.recv(READ_BYTES)
                if part:
                    recording.times.append(time.perf_counter())
                    recording.parts.append(part)
                    continue
                self._leave(descriptor)
                if self._waiting:
                    self._send_next()

    def close(self) -> None:
        for descriptor in tuple(self._open):
            self._leave(descriptor)
        self._poll.close()

    def _send_next(self) -> None:
        recording = Recording(time.perf_counter())
        try:
            connection = socket.create_connection(self._address)
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        self._open[connection.fileno()] = connection, recording
        self.recordings.append(recording)
        self._poll.register(connection, select.EPOLLIN)
        connection.sendall(self._waiting.popleft())

    def _leave(self, descriptor: int) -> None:
        connection, _ = self._open.pop(descriptor)
        self._poll.unregister(descriptor)
        connection.close()
