"""The first bytes of a connection: who has not said the secret gets one kilobyte and five seconds.

Owns how blocking code opens a connection and lets one in. Whoever connects may be a stranger who is
silent, trickles or lies about lengths; none of them keeps anybody else waiting.
"""

import hmac
import selectors
import socket
import struct
import time
from typing import Protocol, Self

from worker.transport.tls import node_tls
from worker.transport.tls_connection import TlsConnection

MAX_HELLO_BYTES = 1024  # of the frame with the secret, its length included
HELLO_SECONDS = 5.0  # for all of it; with TLS, as much for the handshake before it
MAX_STRANGERS = 64  # that are listened to at once; the oldest goes for the next
LENGTH = struct.Struct("<I")  # in front of each frame


class Connection(Protocol):
    """A stream socket, or one behind TLS."""

    def recv(self, size: int, /) -> bytes: ...
    def recv_into(self, target: memoryview, /) -> int: ...
    def sendall(self, data: bytes | memoryview, /) -> None: ...
    def fileno(self) -> int: ...
    def settimeout(self, timeout: float | None, /) -> None: ...
    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


def knows_secret(said: bytes, secret: bytes) -> bool:
    """Compare what a peer has said with the secret, in a time that tells nothing of it."""
    return hmac.compare_digest(said, secret)


def hello_length(header: bytes) -> int | None:
    """Return the length that a first frame announces; None if no secret is so long."""
    length: int = LENGTH.unpack(header)[0]
    return length if length <= MAX_HELLO_BYTES - LENGTH.size else None


def connect(address: tuple[str, int], secret: bytes, timeout: float) -> Connection:
    """Open a connection and say the secret; `timeout` seconds for each wait, later ones too.

    Raises:
        OSError: if nobody listens there, or, with TLS, if it is no host of this cluster.
    """
    raw = socket.create_connection(address, timeout)
    connection: Connection = raw
    try:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = node_tls()
        if tls is not None:
            connection = guarded = TlsConnection(raw, tls.client, address[0])
            guarded.handshake()
        connection.sendall(LENGTH.pack(len(secret)) + secret)
    except OSError:
        connection.close()
        raise
    return connection


def accept(server: socket.socket, secret: bytes) -> Connection:
    """Wait for one peer that knows the secret; drop all that do not, and all others that wait.

    Raises:
        TimeoutError: if none has come within the server's own timeout.
    """
    with Door(server, secret) as door:
        return door.accept()


class Door:
    """Lets in those who know the secret, one after the other; a context that drops all others."""

    def __init__(self, server: socket.socket, secret: bytes) -> None:
        self._server = server
        self._secret = secret
        self._timeout = server.gettimeout()
        self._strangers: list[_Stranger] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> "Door":
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        for stranger in self._strangers:
            stranger.connection.close()
        self._selector.close()
        self._server.settimeout(self._timeout)

    def accept(self) -> Connection:
        """Wait for the next one who knows the secret.

        Raises:
            TimeoutError: if none has come within the server's own timeout.
        """
        end = None if self._timeout is None else time.monotonic() + self._timeout
        while True:
            friend = self._listen(end)
            if friend is not None:
                self._selector.unregister(friend.connection)
                self._strangers.remove(friend)
                friend.connection.settimeout(None)
                return friend.connection

    def _listen(self, end: float | None) -> "_Stranger | None":
        """Wait for the next news of anybody; return who has said the secret.

        Raises:
            TimeoutError: if the time `end` has passed.
        """
        ends = [one.deadline for one in self._strangers] + ([] if end is None else [end])
        ready = self._selector.select(max(0.0, min(ends) - time.monotonic()) if ends else None)
        now = time.monotonic()
        for key, _ in ready:
            stranger: _Stranger | None = key.data
            if stranger is None:
                self._let_in()
                continue
            is_known = stranger.listen(self._secret) if stranger in self._strangers else None
            if is_known:
                return stranger
            if is_known is False:
                self._drop(stranger)
        for stranger in [one for one in self._strangers if one.deadline <= now]:
            self._drop(stranger)
        if end is not None and now > end:
            raise TimeoutError("nobody has come who knows the secret")
        return None

    def _let_in(self) -> None:
        try:
            raw, _ = self._server.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has gone meanwhile
            return
        if len(self._strangers) == MAX_STRANGERS:
            self._drop(self._strangers[0])
        stranger = _Stranger(raw)
        self._strangers.append(stranger)
        self._selector.register(stranger.connection, selectors.EVENT_READ, stranger)

    def _drop(self, stranger: "_Stranger") -> None:
        self._selector.unregister(stranger.connection)
        self._strangers.remove(stranger)
        stranger.connection.close()


class _Stranger:
    """A connection that has not said the secret yet."""

    def __init__(self, raw: socket.socket) -> None:
        raw.setblocking(False)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = node_tls()
        self._handshaking: TlsConnection | None = None
        self.connection: Connection = raw
        if tls is not None:
            self.connection = self._handshaking = TlsConnection(raw, tls.server, None)
        self.deadline = time.monotonic() + HELLO_SECONDS
        self._said = b""

    def listen(self, secret: bytes) -> bool | None:
        """Hear what has come; True or False once it is known who it is."""
        try:
            if self._handshaking is not None:
                self._handshaking.handshake()
                self._handshaking = None
                self.deadline = time.monotonic() + HELLO_SECONDS
            while True:
                missing = self._missing()
                if missing is None:
                    return False
                if missing == 0:
                    return knows_secret(self._said[LENGTH.size :], secret)
                part = self.connection.recv(missing)
                if not part:
                    return False
                self._said += part
        except BlockingIOError:
            return None
        except OSError:
            return False

    def _missing(self) -> int | None:
        """Return how many bytes are missing of what is known to come; None if they are too many."""
        if len(self._said) < LENGTH.size:
            return LENGTH.size - len(self._said)
        length = hello_length(self._said[: LENGTH.size])
        return None if length is None else LENGTH.size + length - len(self._said)
