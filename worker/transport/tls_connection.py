"""A socket behind TLS for blocking code in which one thread may receive while another one sends.

Python's own `SSLSocket` lets two threads into OpenSSL's state at once, for which that is not made.
Here records are made and opened in memory, one thread at a time, and none waits there for the wire.
"""

import socket
import ssl
import threading

_RECEIVED_BYTES = 64 * 1024  # of one look at the socket
_SENT_BYTES = 256 * 1024  # made into records before they are sent


class TlsConnection:
    """One end; what it shares with `socket.socket` is called the same."""

    def __init__(
        self, raw: socket.socket, context: ssl.SSLContext, server_name: str | None
    ) -> None:
        """Prepare a connection; `handshake` comes next.

        Args:
            raw: connected; this object's from now on.
            context: of this side.
            server_name: the name or address that the other end's certificate must have; None if
                this end is the one that was connected to.
        """
        self._raw = raw
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_name is None,
            server_hostname=server_name,
        )
        self._state = threading.Lock()  # of OpenSSL
        self._sending = threading.Lock()  # records must be sent in the order of their making

    def handshake(self) -> None:
        """Shake hands; on a socket without blocking, go on from where that stopped.

        Raises:
            BlockingIOError: if it needs more from a socket without blocking.
            OSError: if the other end is not let in, or has gone; `ssl.SSLError` is one.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                self._fill()
                continue
            except ssl.SSLError:
                self._flush()  # the other end is told why
                raise
            self._flush()
            return

    def recv_into(self, target: memoryview) -> int:
        """Receive at most as many bytes as `target` holds; 0 at the end of the stream.

        Raises:
            OSError: if the connection has failed.
        """
        while True:
            with self._state:
                try:
                    return self._tls.read(len(target), target)  # type: ignore[return-value]
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                    return 0
                except ssl.SSLError as error:  # it was refused, or what came was changed
                    raise ConnectionAbortedError(f"TLS: {error}") from error
            self._fill()

    def recv(self, size: int) -> bytes:
        """Receive at most `size` bytes; none at the end of the stream."""
        target = bytearray(size)
        return bytes(target[: self.recv_into(memoryview(target))])

    def sendall(self, data: bytes | memoryview) -> None:
        """Send all of the bytes."""
        rest = memoryview(data)
        with self._sending:
            while rest:
                part = rest[:_SENT_BYTES]
                rest = rest[_SENT_BYTES:]
                with self._state:
                    while part:
                        part = part[self._tls.write(part) :]
                    records = self._outgoing.read()
                self._raw.sendall(records)

    def _fill(self) -> None:
        data = self._raw.recv(_RECEIVED_BYTES)
        with self._state:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._raw.sendall(self._outgoing.read())

    def fileno(self) -> int:
        """Return the socket's file."""
        return self._raw.fileno()

    def settimeout(self, timeout: float | None) -> None:
        """Let each wait for the socket last so many seconds at most."""
        self._raw.settimeout(timeout)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Set an option of the socket."""
        self._raw.setsockopt(level, option, value)

    def shutdown(self, how: int) -> None:
        """Wake whoever receives, or sends, in another thread: for it the stream is over."""
        self._raw.shutdown(how)

    def close(self) -> None:
        """End the connection; nothing that was sent is lost."""
        self._raw.close()

    def __enter__(self) -> "TlsConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
