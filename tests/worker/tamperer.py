"""Stands on the wire between a scheduler and one rank, and changes the frames that pass."""

import socket
import threading
from collections.abc import Callable

from worker.transport.channel import ChannelClosed, listen, receive, send

Change = Callable[[int, bytes], list[bytes]]  # (step, frame) to the frames that arrive instead


class Tamperer:
    """Passes a scheduler's frames on to a rank, changed, and the replies as they are."""

    def __init__(self, rank: tuple[str, int], change: Change) -> None:
        self._rank = rank
        self._change = change
        self._server = listen("127.0.0.1")
        host, port = self._server.getsockname()
        self.address: tuple[str, int] = (host, port)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait until both sides have gone; False if that takes too long."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with self._server:
            ours, _ = self._server.accept()
        with ours, socket.create_connection(self._rank) as theirs:
            answers = threading.Thread(target=_pass_on, args=(theirs, ours))
            answers.start()
            self._tamper(ours, theirs)
            answers.join()

    def _tamper(self, ours: socket.socket, theirs: socket.socket) -> None:
        step = 0  # the first frame is the secret
        try:
            while True:
                frame = receive(ours)
                for changed in self._change(step, frame) if step else [frame]:
                    send(theirs, changed)
                step += 1
        except (ChannelClosed, OSError):
            _end(theirs)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
    except OSError:
        pass
    _end(target)


def _end(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other side has done it
