"""How an HTTP/1.1 request is written, and how a response tells its head from its body.

Pure: bytes in, content out, in whatever pieces they come. Owns how a body is framed: by chunks, by
its length, or by the end of the connection.
"""

import httpx

END_OF_HEAD = b"\r\n\r\n"
NO_LONGER_SO = ("host", "connection", "accept-encoding", "content-length", "transfer-encoding")


def request_bytes(request: httpx.Request, body: bytes) -> bytes:
    """Return a request as it is written to a connection that ends with the response."""
    lines = [
        b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path),
        b"host: " + request.url.netloc,
        b"connection: close",
        b"content-length: %d" % len(body),
    ]
    for name, value in request.headers.raw:
        if name.decode().lower() not in NO_LONGER_SO:
            lines.append(name + b": " + value)
    return b"\r\n".join(lines) + END_OF_HEAD + body


def parsed_head(head: bytes) -> tuple[int, httpx.Headers]:
    """Return the status and the headers that a head tells.

    Raises:
        httpx.RemoteProtocolError: if it is not the head of a response.
    """
    first, *lines = head.removesuffix(END_OF_HEAD).split(b"\r\n")
    version, _, rest = first.partition(b" ")
    if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
        raise httpx.RemoteProtocolError(f"not the head of a response: {first[:80]!r}")
    pairs = (line.partition(b":") for line in lines)
    return int(rest[:3]), httpx.Headers([(name, value.strip()) for name, _, value in pairs])


class Body:
    """The body of one response, as far as it is here."""

    def __init__(self, headers: httpx.Headers) -> None:
        self.is_whole = False  # nothing of it is to come
        self._is_chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        length = headers.get("content-length")
        self._left = None if length is None else int(length)  # of the content length
        self._held = b""  # the beginning of a chunk
        if self._left == 0 and not self._is_chunked:
            self.is_whole = True

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes after the head; return the content among them.

        Raises:
            httpx.RemoteProtocolError: if what should be the size of a chunk is none.
        """
        if self._is_chunked:
            return self._content_of_chunks(self._held + data)
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
            self.is_whole = self._left == 0
        return data

    def end(self) -> None:
        """Learn that the connection was closed.

        Raises:
            httpx.RemoteProtocolError: if something is missing.
        """
        if not self.is_whole and (self._is_chunked or self._left is not None):
            raise httpx.RemoteProtocolError("the connection was closed within a response")
        self.is_whole = True

    def _content_of_chunks(self, data: bytes) -> bytes:
        content, start = [], 0
        while not self.is_whole and (stop := data.find(b"\r\n", start)) >= 0:
            size = _chunk_size(data[start:stop])
            self.is_whole = size == 0
            end = stop + 2 + size
            if self.is_whole or len(data) < end + 2:
                break
            content.append(data[stop + 2 : end])
            start = end + 2
        self._held = data[start:]
        return b"".join(content)


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise httpx.RemoteProtocolError(f"not the size of a chunk: {line[:80]!r}") from None
