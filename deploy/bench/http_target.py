"""A server with OpenAI's completions API, or one like it, as the target of a workload."""

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Protocol

import httpx
import msgspec

from deploy.bench.closed_loop import Recording, record
from deploy.bench.framing import END_OF_HEAD, Body, parsed_head, request_bytes
from deploy.bench.workload import Ask, Run, Sample, Workload

PATIENCE = 600.0  # seconds without a byte from anybody

Count = Callable[[bytes], int]


class BenchError(Exception):
    """The target answered something other than the tokens that were asked for."""


class Dialect(Protocol):
    """How a server is asked for tokens, and how it tells them."""

    @property
    def path(self) -> str: ...

    def body(self, ask: Ask) -> dict[str, object]:
        """Return what to send, as JSON."""
        ...

    def counter(self) -> Count:
        """Return what tells the new tokens in each event of one response, in their order.

        It raises BenchError if an event is an error.
        """
        ...


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    """What a benchmark reads of one event."""

    choices: list[_Choice] | None = None
    error: msgspec.Raw = msgspec.Raw()


_chunk_of = msgspec.json.Decoder(_Chunk).decode


class OpenAI:
    """OpenAI's completions, with the ids of the tokens that our server and vLLM add."""

    path = "/v1/completions"

    def body(self, ask: Ask) -> dict[str, object]:
        """Return a request for exactly so many tokens."""
        return {
            "model": ask.model,
            "prompt": list(ask.token_ids),
            "max_tokens": ask.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }

    def counter(self) -> Count:
        """Return what counts the ids in each event."""

        def count(data: bytes) -> int:
            chunk = _chunk_of(data)
            if chunk.choices is None:
                raise BenchError(bytes(chunk.error or data).decode())
            return sum(len(choice.token_ids or ()) for choice in chunk.choices)

        return count


OPENAI = OpenAI()


class HttpTarget:
    """Streams completions from a base URL."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        label: str = "topwork",
        dialect: Dialect = OPENAI,
    ) -> None:
        self.label = label
        self._dialect = dialect
        self._url = url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def run(self, workload: Workload, round_number: int) -> Run:
        """Answer one round of a workload and return its times.

        Raises:
            BenchError: if the server gives another answer.
            httpx.TransportError: if it cannot be reached, falls silent or breaks off.
        """
        asks = workload.asks(round_number)
        requests = [self._request(ask) for ask in asks]
        url = httpx.URL(self._url)
        if url.scheme != "http":
            raise httpx.UnsupportedProtocol(f"{url.scheme} is not plain HTTP")
        address = (url.host, url.port or 80)
        recordings = record(address, requests, workload.concurrency, PATIENCE)
        return Run(tuple(map(self._sample, asks, recordings)))

    def close(self) -> None:
        """Do nothing: every round opens and closes its own connections."""

    def _request(self, ask: Ask) -> bytes:
        headers = self._headers | {"content-type": "application/json"}
        request = httpx.Request("POST", self._url + self._dialect.path, headers=headers)
        return request_bytes(request, msgspec.json.encode(self._dialect.body(ask)))

    def _sample(self, ask: Ask, recording: Recording) -> Sample:
        times = tuple(_recorded_times(recording, self._dialect.counter()))
        if len(times) != ask.num_output_tokens:
            raise BenchError(f"{len(times)} tokens instead of {ask.num_output_tokens}")
        return Sample(recording.sent, times)


async def token_times(
    client: httpx.AsyncClient, ask: Ask, dialect: Dialect = OPENAI
) -> AsyncGenerator[float, None]:
    """Send one request and yield when each of its tokens arrives, in seconds of perf_counter.

    Raises:
        BenchError: if the server answers with an error.
    """
    count = dialect.counter()
    async with client.stream("POST", dialect.path, json=dialect.body(ask)) as reply:
        if reply.status_code != 200:
            raise BenchError(f"{reply.status_code}: {(await reply.aread()).decode()}")
        async with aclosing(event_data(reply)) as events:
            async for data in events:
                now = time.perf_counter()
                for _ in range(count(data)):
                    yield now


async def event_data(reply: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Give what each server-sent event of a response says, but for the [DONE] at the end."""
    events = _Events()
    async for part in reply.aiter_raw():
        for data in events.feed(part):
            yield data


class _Events:
    """Server-sent events out of the pieces of a body."""

    def __init__(self) -> None:
        self._held = b""  # the beginning of a line

    def feed(self, part: bytes) -> list[bytes]:
        """Return what the events say that are here now, but for the [DONE] at the end."""
        *lines, self._held = (self._held + part).split(b"\n")
        return [
            line[6:]
            for line in lines
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]")
        ]


def _recorded_times(recording: Recording, count: Count) -> Iterator[float]:
    """Yield when each token arrived.

    Raises:
        BenchError: if the response is an error.
        httpx.RemoteProtocolError: if it is none, or not whole.
    """
    parts = list(zip(recording.times, recording.parts, strict=True))
    head, parts = _without_head(parts)
    status, headers = parsed_head(head)
    body = Body(headers)
    if status != 200:
        said = b"".join(body.feed(part) for _, part in parts)
        raise BenchError(f"{status}: {said.decode()}")
    events = _Events()
    for at, part in parts:
        for data in events.feed(body.feed(part)):
            for _ in range(count(data)):
                yield at
    body.end()


def _without_head(
    parts: list[tuple[float, bytes]],
) -> tuple[bytes, list[tuple[float, bytes]]]:
    """Return the head of a response, and the parts of its body."""
    head = b""
    for number, (at, part) in enumerate(parts):
        head, end, rest = (head + part).partition(END_OF_HEAD)
        if end:
            return head, [(at, rest), *parts[number + 1 :]]
    raise httpx.RemoteProtocolError(f"no head of a response: {head[:80]!r}")
