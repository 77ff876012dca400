"""Clients that are slow: bodies that trickle, and streams that nobody reads."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Iterable

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from cluster.api import reader_watch
from cluster.api.http import EventStream, RequestContext
from cluster.api.middleware.body_timeout import MIN_RATE, TimedBody
from cluster.api.reader_watch import ReaderWatch
from cluster.errors import RequestTimeout
from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.cluster.conftest import Serving
from tests.patience import PATIENCE

SECONDS = 0.2
ENOUGH = int(MIN_RATE * SECONDS) + 1
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def part(data: bytes, more: bool = True) -> Message:
    return {"type": "http.request", "body": data, "more_body": more}


async def read(parts: Iterable[tuple[float, Message]], work: float = 0.0) -> int:
    """Return the bytes of a body whose parts come after so many seconds each.

    `work` is what their reader takes for each.
    """
    queue: asyncio.Queue[Message] = asyncio.Queue()

    async def send() -> None:
        for pause, message in parts:
            await asyncio.sleep(pause)
            queue.put_nowait(message)

    sending = asyncio.create_task(send())
    reader = TimedBody(queue.get, SECONDS)
    num_bytes, more = 0, True
    try:
        while more:
            message = await reader()
            num_bytes += len(message["body"])
            more = message["more_body"]
            await asyncio.sleep(work)
    finally:
        sending.cancel()
    return num_bytes


def test_a_body_that_trickles_is_ended() -> None:
    with pytest.raises(RequestTimeout, match="not come within 0.2 s"):
        asyncio.run(read([(0.05, part(b"x"))] * 100))


def test_a_body_that_stops_is_ended_however_much_has_come() -> None:
    with pytest.raises(RequestTimeout):
        asyncio.run(read([(0, part(b"x" * ENOUGH)), (60, part(b"x"))]))


def test_a_large_body_may_take_long_if_enough_of_it_comes() -> None:
    # Each part comes within the time-out, and all of them take six.
    parts = [(0.1, part(b"x" * ENOUGH))] * 12
    assert asyncio.run(read([*parts, (0, part(b"", more=False))])) == 12 * ENOUGH


def test_the_time_that_the_reader_takes_does_not_count() -> None:
    parts = [(0.0, part(b"x"))] * 5
    assert asyncio.run(read([*parts, (0, part(b"x", more=False))], work=0.1)) == 6


def test_half_a_body_is_answered_408_and_its_connection_closed(
    serve: Callable[..., Serving],
) -> None:
    serving = serve(FakeScheduler(), body_timeout=SECONDS)
    address = serving.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=PATIENCE) as client:
        client.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        received = b""
        while data := client.recv(65536):
            received += data
    assert received.startswith(b"HTTP/1.1 408 ")
    assert b"the body has not come within 0.2 s" in received


async def watched(sends: Callable[[ReaderWatch], object]) -> bool:
    """Return whether the watch has ended a stream that is sent so."""
    ended: list[bool] = []

    async def stream() -> None:
        watch = ReaderWatch("job-7")
        try:
            result = sends(watch)
            assert asyncio.iscoroutine(result)
            await result
        except asyncio.CancelledError:
            pass
        finally:
            watch.stop()
            ended.append(watch.has_ended)

    await asyncio.create_task(stream())
    return ended[0]


def test_a_stream_whose_client_takes_nothing_is_ended_with_a_word_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reader_watch, "READER_TIMEOUT", 0.1)

    async def stuck(watch: ReaderWatch) -> None:
        watch.turn += 1
        await asyncio.sleep(PATIENCE)

    with caplog.at_level(logging.WARNING, "topwork.router"):
        assert asyncio.run(watched(stuck))
    assert "job-7: its client has taken nothing for 0.1 s" in caplog.text


def test_a_client_that_does_not_read_holds_its_stream_no_longer_than_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through a real server and the kernel's buffers; the source of the stream is closed."""
    monkeypatch.setattr(reader_watch, "READER_TIMEOUT", 0.2)
    num_parts = 0
    is_closed = asyncio.Event()

    async def endless() -> AsyncGenerator[bytes]:
        nonlocal num_parts
        try:
            while True:
                num_parts += 1
                yield b"x" * 65536
                await asyncio.sleep(0)
        finally:
            is_closed.set()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await EventStream(b"first", endless())(scope, receive, send)

    async def run() -> None:
        config = uvicorn.Config(RequestContext(answer), log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server.serve([listener]))
            _, writer = await asyncio.open_connection(*listener.getsockname(), limit=1024)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.wait_for(is_closed.wait(), PATIENCE)
            writer.transport.abort()
            server.should_exit = True
            await asyncio.wait_for(serving, PATIENCE)

    asyncio.run(run())
    assert 1 < num_parts < 1000


def test_a_stream_may_be_silent_or_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_watch, "READER_TIMEOUT", 0.1)

    async def silent(watch: ReaderWatch) -> None:
        await asyncio.sleep(0.5)

    async def slow(watch: ReaderWatch) -> None:
        for _ in range(10):
            watch.turn += 1
            await asyncio.sleep(0.05)
            watch.turn += 1

    assert not asyncio.run(watched(silent))
    assert not asyncio.run(watched(slow))
