"""How many bytes of large bodies a router holds: the rest is turned away before it is read."""

import asyncio
import json
import socket
from collections.abc import Callable

import httpx

from cluster.router.bodies.reader import SMALL_BODY
from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.cluster.conftest import Serving
from tests.patience import PATIENCE

LARGE = json.dumps({"model": "tiny", "prompt": "a b " * 50_000, "max_tokens": 1}).encode()
SMALL = json.dumps({"model": "tiny", "prompt": "a b", "max_tokens": 1}).encode()


def post(serving: Serving, content: bytes, path: str = "/v1/completions") -> httpx.Response:
    return httpx.post(serving.url + path, content=content, timeout=PATIENCE)


class HalfSent:
    """A call whose body has come in part, and has been taken in."""

    def __init__(self, serving: Serving, num_bytes: int) -> None:
        host, port = serving.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)))
        head = f"POST /tokenize HTTP/1.1\r\nHost: {host}\r\nContent-Length: {2 * num_bytes}\r\n\r\n"
        self._socket.sendall(head.encode() + b" " * num_bytes)

    def end(self) -> None:
        self._socket.close()


async def until(is_met: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not is_met():
            await asyncio.sleep(0.01)


def test_beyond_the_room_a_large_body_is_turned_away_and_a_small_one_is_not(
    serve_once: Callable[..., Serving],
) -> None:
    serving = serve_once(FakeScheduler(), body_memory=300_000, context_length=1 << 20)
    room = serving.router.bodies.room
    half = HalfSent(serving, 140_000)
    serving.run(until(lambda: room.num_held == 140_000))
    reply = post(serving, LARGE)
    assert reply.status_code == 429 and int(reply.headers["retry-after"]) >= 1
    assert "140000 bytes of large bodies are being read, and" in reply.text
    assert post(serving, SMALL).status_code == 200
    half.end()
    serving.run(until(lambda: not room.num_held))
    assert post(serving, LARGE).status_code == 200
    assert not room.num_held


def test_a_body_that_is_over_the_limit_is_refused_by_its_announced_size(
    serve_once: Callable[..., Serving],
) -> None:
    serving = serve_once(FakeScheduler(), max_body_bytes=100_000)
    host, port = serving.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), PATIENCE) as connection:
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n"
            "Content-Length: 100001\r\n\r\n".encode()
        )
        assert b" 400 " in connection.recv(1000)
    assert not serving.router.bodies.room.num_held


def test_what_is_refused_and_what_is_passed_on_by_invocations_gives_its_room_back(
    serve_once: Callable[..., Serving],
) -> None:
    serving = serve_once(FakeScheduler(), context_length=1 << 20)
    assert post(serving, LARGE[:-1]).status_code == 400
    assert post(serving, LARGE, "/invocations").status_code == 200
    assert post(serving, b"[" * SMALL_BODY * 2, "/invocations").status_code == 400
    assert not serving.router.bodies.room.num_held
