"""Frames over a stream socket: a 4-byte little-endian length, then that many bytes.

Used between scheduler and ranks, and between routers and schedulers. A connection opens with a
shared secret, because a socket of a host is open to every process on it; between hosts it is behind
TLS where the cluster has certificates. Frames are opaque bytes; nothing is ever unpickled.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable

from worker.transport.hello import HELLO_SECONDS, LENGTH, Connection, hello_length, knows_secret
from worker.transport.tls import node_tls

MAX_FRAME_BYTES = 256 * 1024 * 1024


class ChannelClosed(Exception):
    """The other end closed the connection, or died."""


class BadFrame(Exception):
    """The other end sent what no correct peer sends: an oversized frame or a wrong secret."""


def _checked_length(header: bytes) -> int:
    length: int = LENGTH.unpack(header)[0]
    if length > MAX_FRAME_BYTES:
        raise BadFrame(f"frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return length


def frame(payload: bytes) -> bytes:
    """Return the payload with its length in front."""
    assert len(payload) <= MAX_FRAME_BYTES, f"frame of {len(payload)} bytes"
    return LENGTH.pack(len(payload)) + payload


def listen(host: str) -> socket.socket:
    """Return a socket that listens on a free port of `host`."""
    server = socket.create_server((host, 0), backlog=64)
    return server


def _receive_exactly(connection: Connection, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise ChannelClosed("connection closed by the other end")
        parts += part
    return bytes(parts)


def receive(connection: Connection) -> bytes:
    """Block until a whole frame has come and return its payload.

    Raises:
        ChannelClosed: at end of stream.
        BadFrame: if the frame is over the size limit.
    """
    return _receive_exactly(connection, _checked_length(_receive_exactly(connection, 4)))


def send(connection: Connection, payload: bytes) -> None:
    """Send one frame."""
    connection.sendall(frame(payload))


class Channel:
    """One end of a framed connection for asyncio."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    async def connect(cls, address: tuple[str, int], secret: bytes) -> "Channel":
        """Open a connection and present the secret.

        Raises:
            OSError: if no process listens there, or, with TLS, if it is no host of this cluster.
        """
        tls = node_tls()
        if tls is None:
            channel = cls(*await asyncio.open_connection(*address))
        else:
            channel = cls(
                *await asyncio.open_connection(
                    *address,
                    ssl=tls.client,
                    ssl_handshake_timeout=HELLO_SECONDS,
                    ssl_shutdown_timeout=HELLO_SECONDS,
                )
            )
        channel.send(secret)
        return channel

    @classmethod
    async def accepted(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
    ) -> "Channel | None":
        """Check the secret of a peer that has just connected; None if it does not know it."""
        channel = cls(reader, writer)
        said = None
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                length = hello_length(await reader.readexactly(LENGTH.size))
                if length is not None:
                    said = await reader.readexactly(length)
        except (asyncio.IncompleteReadError, TimeoutError, OSError):
            pass
        if said is None or not knows_secret(said, secret):
            writer.transport.abort()  # nobody is told anything, nor waited for
            return None
        return channel

    def send(self, payload: bytes) -> None:
        """Queue one frame; use `drain` where the peer may be slower than the sender."""
        self._writer.write(frame(payload))

    async def drain(self) -> None:
        """Wait until the send buffer is below its high-water mark."""
        await self._writer.drain()

    @property
    def unsent_bytes(self) -> int:
        """Bytes accepted by `send` that the operating system has not taken yet."""
        return self._writer.transport.get_write_buffer_size()

    async def receive(self) -> bytes:
        """Return the payload of the next frame.

        Raises:
            ChannelClosed: at end of stream or on a reset.
            BadFrame: if the frame is over the size limit.
        """
        try:
            length = _checked_length(await self._reader.readexactly(LENGTH.size))
            return await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError) as error:
            raise ChannelClosed(str(error)) from error

    def close(self) -> None:
        """Close the connection; what is queued may be lost."""
        self._writer.close()


Accepted = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]


async def start_server(accepted: Accepted, host: str) -> asyncio.Server:
    """Listen on a free port of `host`; `accepted` gets each connection, behind TLS if there is any.

    Raises:
        OSError: if there is no such address here, or no certificate where one is asked for.
    """
    tls = node_tls()
    if tls is None:
        return await asyncio.start_server(accepted, host, 0)
    return await asyncio.start_server(
        accepted,
        host,
        0,
        ssl=tls.server,
        ssl_handshake_timeout=HELLO_SECONDS,
        ssl_shutdown_timeout=HELLO_SECONDS,
    )


def stop_listening(server: asyncio.Server) -> None:
    """Close a server as soon as it has handed over what it has accepted.

    `Server.close` of Python 3.11 loses a connection that is accepted in the same turn of the loop.
    """
    loop = server.get_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())
    loop.call_soon(server.close)
