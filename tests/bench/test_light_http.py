"""The benchmark's own HTTP: every way in which a server may frame what it says."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import httpx
import pytest

from deploy.bench.closed_loop import record
from deploy.bench.http_target import BenchError, HttpTarget, token_times
from deploy.bench.workload import Ask, Run, Workload
from tests.bench.light_http import light_client

ASK = Ask("a", (1, 2), 3)
REQUEST = b"POST /v1/completions HTTP/1.1\r\ncontent-length: 0\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
EVENTS = b'data: {"choices":[{"token_ids":[1,2]}]}\r\n\r\ndata: {"choices":[{"token_ids":[3]}]}\n\n'
EVENTS += b'data: {"choices":[],"usage":{}}\n\ndata: [DONE]\n\n'
HALF = len(EVENTS) // 2
CHUNKED = b"%x\r\n%b\r\n%x;a=b\r\n%b\r\n0\r\n\r\n" % (
    HALF, EVENTS[:HALF], len(EVENTS) - HALF, EVENTS[HALF:]
)  # fmt: skip
REPLIES = {
    "chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    "length": HEAD + b"Content-Length: %d\r\n\r\n" % len(EVENTS) + EVENTS,
    "close": HEAD + b"\r\n" + EVENTS,
}


@asynccontextmanager
async def server(reply: bytes, step: int, *, hangs: bool = False) -> AsyncIterator[str]:
    """Answer every connection with these bytes, `step` at a time, and close it."""
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):  # also where the loop ends before it has seen the client leave
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            asked.append(head + await reader.readexactly(length))
            for start in range(0, len(reply), step):
                writer.write(reply[start : start + step])
                await asyncio.sleep(0)
            if hangs:
                await reader.read()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    assert all(request.startswith(b"POST /v1/completions HTTP/1.1\r\n") for request in asked)


def workload(num_requests: int = 3, output_len: int = 3) -> Workload:
    """Two clients."""
    return Workload(
        name="light",
        models=("a",),
        concurrency=2,
        num_requests=num_requests,
        input_len=2,
        output_len=output_len,
    )


async def run(url: str, work: Workload) -> Run:
    """Run a workload beside the server, which lives in this loop."""
    return await asyncio.to_thread(HttpTarget(url, "key").run, work, 0)


@pytest.mark.parametrize("framing", REPLIES)
@pytest.mark.parametrize("step", [1, 7, 10_000])
async def test_tokens_are_counted_however_a_response_is_framed_and_cut(
    framing: str, step: int
) -> None:
    async with server(REPLIES[framing], step) as url, light_client(url) as client:
        for _ in range(2):
            assert len([at async for at in token_times(client, ASK)]) == 3
        measured = await run(url, workload())
    for sample in measured.samples:
        assert len(sample.token_times) == 3
        assert sample.sent < sample.token_times[0] == sample.token_times[1]  # of one event
        assert list(sample.token_times) == sorted(sample.token_times)


@pytest.mark.parametrize("framing", ["chunks", "length"])
async def test_a_response_that_breaks_off_is_no_answer(framing: str) -> None:
    async with server(REPLIES[framing][:-9], 1000) as url, light_client(url) as client:
        with pytest.raises(httpx.RemoteProtocolError, match="within a response"):
            [at async for at in token_times(client, ASK)]
        with pytest.raises(httpx.RemoteProtocolError, match="within a response"):
            await run(url, workload())


async def test_errors_are_told_with_their_status_and_within_a_stream() -> None:
    refusal = b"HTTP/1.1 404 Not Found\r\nContent-Length: 13\r\n\r\nno such model"
    async with server(refusal, 5) as url, light_client(url) as client:
        with pytest.raises(BenchError, match="404: no such model"):
            [at async for at in token_times(client, ASK)]
        with pytest.raises(BenchError, match="404: no such model"):
            await run(url, workload())
    broken = HEAD + b'\r\ndata: {"error":{"message":"lost"}}\n\n'
    async with server(broken, 1000) as url, light_client(url) as client:
        with pytest.raises(BenchError, match="lost"):
            [at async for at in token_times(client, ASK)]
        with pytest.raises(BenchError, match="lost"):
            await run(url, workload())


async def test_what_is_no_response_is_told() -> None:
    async with server(b"220 mail.example ESMTP\r\n\r\n", 1000) as url:
        with pytest.raises(httpx.RemoteProtocolError, match="not the head of a response: b'220"):
            await run(url, workload())
    async with server(b"HTTP/1.1 200 OK\r\n", 1000) as url:
        with pytest.raises(httpx.RemoteProtocolError, match="no head of a response"):
            await run(url, workload())


async def test_a_server_that_is_silent_or_away_is_noticed() -> None:
    reply = REPLIES["chunks"][:-9]
    async with server(reply, 1000, hangs=True) as url, light_client(url) as client:
        client.timeout = httpx.Timeout(0.01)
        with pytest.raises(httpx.ReadTimeout):
            [at async for at in token_times(client, ASK)]
        address = (client.base_url.host, client.base_url.port or 0)
        with pytest.raises(httpx.ReadTimeout, match=r"silent for 0\.01 s"):
            await asyncio.to_thread(record, address, [REQUEST] * 3, 2, 0.01)
    async with light_client(url) as client:
        with pytest.raises(httpx.ConnectError):
            [at async for at in token_times(client, ASK)]
        with pytest.raises(httpx.ConnectError):
            await run(url, workload())


async def test_an_answer_with_too_few_tokens_does_not_count() -> None:
    async with server(REPLIES["close"], 1000) as url:
        with pytest.raises(BenchError, match="3 tokens instead of 4"):
            await run(url, workload(output_len=4))


async def test_no_more_requests_are_under_way_than_there_are_clients() -> None:
    async with server(REPLIES["length"], 7) as url:
        samples = (await run(url, workload(num_requests=6))).samples
    assert len(samples) == 6
    for sample in samples[2:]:
        ended = sorted(other.token_times[-1] for other in samples)
        assert sum(at < sample.sent for at in ended) >= samples.index(sample) - 1


async def test_only_plain_http_is_spoken() -> None:
    with pytest.raises(httpx.UnsupportedProtocol, match="https is not plain HTTP"):
        HttpTarget("https://127.0.0.1:1").run(workload(), 0)
