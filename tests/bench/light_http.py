"""HTTP/1.1 in as few steps as it takes: a benchmark's client leaves the cores to the server.

A transport for httpx: each request has a connection of its own, which ends with the response. Owns
those connections.
"""

import asyncio
from collections.abc import AsyncGenerator

import httpx

from deploy.bench.framing import END_OF_HEAD, Body, parsed_head, request_bytes

MAX_HEAD_BYTES = 2**16
READ_BYTES = 2**16


def light_client(url: str, headers: dict[str, str] | None = None) -> httpx.AsyncClient:
    """Return a client of one server, whose responses are read by this transport."""
    transport = LightTransport()
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=600.0, transport=transport)


class _Connection:
    """One connection to the server; what goes wrong on it has httpx's names."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience: float | None
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._num_reads = 0
        self._look: asyncio.TimerHandle | None = None
        if patience is not None:
            self._look_after(patience)

    @classmethod
    async def open(cls, request: httpx.Request) -> "_Connection":
        patience = request.extensions.get("timeout", {}).get("read")
        try:
            streams = await asyncio.open_connection(
                request.url.host, request.url.port or 80, limit=MAX_HEAD_BYTES
            )
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return cls(*streams, patience)

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def head(self) -> bytes:
        self._num_reads += 1
        try:
            return await self._reader.readuntil(END_OF_HEAD)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError) as error:
            raise httpx.RemoteProtocolError(f"no head of a response: {error}") from error

    async def read(self) -> bytes:
        """Return what has arrived; nothing at the end."""
        self._num_reads += 1
        try:
            return await self._reader.read(READ_BYTES)
        except OSError as error:
            raise httpx.ReadError(str(error)) from error

    def close(self) -> None:
        if self._look is not None:
            self._look.cancel()
        self._writer.close()

    def _look_after(self, patience: float) -> None:
        """End a read that lasts; looking now and then costs less than a timer for each read."""
        seen = self._num_reads

        def look() -> None:
            if self._num_reads == seen:
                self._reader.set_exception(httpx.ReadTimeout(f"silent for {patience:g} s"))
            else:
                self._look_after(patience)

        self._look = asyncio.get_running_loop().call_later(patience, look)


class LightTransport(httpx.AsyncBaseTransport):
    """Plain HTTP over TCP, without compression."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and return the response as soon as its head is here.

        Raises:
            httpx.TransportError: if the server cannot be reached, is silent for twice the client's
                time-out, or does not speak HTTP/1.1.
        """
        if request.url.scheme != "http":
            raise httpx.UnsupportedProtocol(f"{request.url.scheme} is not plain HTTP")
        body = await request.aread()
        connection = await _Connection.open(request)
        try:
            connection.write(request_bytes(request, body))
            status, headers = parsed_head(await connection.head())
        except BaseException:  # also when cancelled: nothing else would close it
            connection.close()
            raise
        return httpx.Response(status, headers=headers, stream=_Stream(Body(headers), connection))


class _Stream(httpx.AsyncByteStream):
    """The bytes of one response, as they come; closing it closes the connection."""

    def __init__(self, body: Body, connection: _Connection) -> None:
        self._body = body
        self._connection = connection

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        body = self._body
        while not body.is_whole:
            data = await self._connection.read()
            if not data:
                body.end()
            elif content := body.feed(data):
                yield content

    async def aclose(self) -> None:
        self._connection.close()
