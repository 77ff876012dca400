"""HTTP/1.1 in as few steps as it takes: a benchmark's client leaves the cores to the server.

A transport for httpx: each request has a connection of its own, which ends with the response. Owns
how a response is framed: by chunks, by its length, or by the end of the connection. Knows nothing
of what bodies say.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import httpx

MAX_HEAD_BYTES = 2**16
READ_BYTES = 2**16
NO_LONGER_SO = ("host", "connection", "accept-encoding", "content-length", "transfer-encoding")

Read = Callable[[], Awaitable[bytes]]


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
            return await self._reader.readuntil(b"\r\n\r\n")
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
            connection.write(_request_head(request, len(body)) + body)
            status, headers = _parsed_head(await connection.head())
        except BaseException:  # also when cancelled: nobody else would close it
            connection.close()
            raise
        return httpx.Response(status, headers=headers, stream=_Body(headers, connection))


class _Body(httpx.AsyncByteStream):
    """The bytes of one response, as they come; closing it closes the connection."""

    def __init__(self, headers: httpx.Headers, connection: _Connection) -> None:
        self._headers = headers
        self._connection = connection

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        read = self._connection.read
        if self._headers.get("transfer-encoding", "").lower() == "chunked":
            parts = _chunks(read)
        elif "content-length" in self._headers:
            parts = _counted(read, int(self._headers["content-length"]))
        else:
            parts = _until_closed(read)
        async with aclosing(parts):
            async for part in parts:
                yield part

    async def aclose(self) -> None:
        self._connection.close()


def _request_head(request: httpx.Request, length: int) -> bytes:
    lines = [
        b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path),
        b"host: " + request.url.netloc,
        b"connection: close",
        b"content-length: %d" % length,
    ]
    for name, value in request.headers.raw:
        if name.decode().lower() not in NO_LONGER_SO:
            lines.append(name + b": " + value)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _parsed_head(head: bytes) -> tuple[int, httpx.Headers]:
    first, *lines = head[:-4].split(b"\r\n")
    version, _, rest = first.partition(b" ")
    if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
        raise httpx.RemoteProtocolError(f"not the head of a response: {first[:80]!r}")
    pairs = (line.partition(b":") for line in lines)
    return int(rest[:3]), httpx.Headers([(name, value.strip()) for name, _, value in pairs])


async def _chunks(read: Read) -> AsyncGenerator[bytes, None]:
    """Give the content of all chunks that have arrived, as one piece each time."""
    held, is_last = b"", False
    while not is_last:
        content, start = [], 0
        while (stop := held.find(b"\r\n", start)) >= 0:
            size = _chunk_size(held[start:stop])
            is_last = size == 0
            end = stop + 2 + size
            if is_last or len(held) < end + 2:
                break
            content.append(held[stop + 2 : end])
            start = end + 2
        if content:
            yield b"".join(content)
        held = held[start:]
        if not is_last:
            held += await _some(read)


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise httpx.RemoteProtocolError(f"not the size of a chunk: {line[:80]!r}") from None


async def _counted(read: Read, length: int) -> AsyncGenerator[bytes, None]:
    while length > 0:
        part = await _some(read)
        length -= len(part)
        yield part


async def _until_closed(read: Read) -> AsyncGenerator[bytes, None]:
    while part := await read():
        yield part


async def _some(read: Read) -> bytes:
    part = await read()
    if not part:
        raise httpx.RemoteProtocolError("the connection was closed within a response")
    return part
