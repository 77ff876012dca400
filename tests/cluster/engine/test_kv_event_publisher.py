"""KV events over real ZeroMQ sockets, read as a subscriber of vLLM's reads them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from cluster.engine.kv_event_feed import KvEventFeed
from cluster.engine.kv_event_publisher import (
    MAX_REQUEST_BYTES,
    KvEventPublisher,
    KvEventPublisherConfig,
    offset_port,
)
from cluster.kv_events import KvEventBatch, vllm_payload
from cluster.request import BASE
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache.radix_tree import namespace
from tests.cluster.kv_mirror import Mirror, as_vllm
from tests.patience import PATIENCE
from tests.ports import free_port

PLAIN = namespace("model", BASE, "")
END = b"\xff" * 8


def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


class World:
    """A publisher, the cache that it speaks of, and the sockets of readers."""

    def __init__(self, **changes: Any) -> None:
        settings = {
            "endpoint": free_endpoint(),
            "replay_endpoint": free_endpoint(),
            "topic": "kv@0@tiny",
        }
        self.config = KvEventPublisherConfig(**(settings | changes))
        self.publisher = KvEventPublisher(self.config)
        self.publisher.open()
        self.context = zmq.asyncio.Context()
        self.feed = KvEventFeed("model", lambda: 1.5, self.publisher)
        self.feed.clear()
        self.cache = PrefixCache(8, 4, self.feed.observer)

    def step(self, start: int, count: int = 3) -> None:
        keys = [(start + n, 7) for n in range(count)]
        match = self.cache.match(PLAIN, keys)
        node = self.cache.lock(match, 1)
        node, _ = self.cache.insert(node, keys, self.cache.allocate(count), 1)
        self.cache.unlock(node, 1)
        self.feed.flush()

    async def subscribe(self, topic: str = "kv@") -> Any:
        """Return a SUB socket whose subscription the publisher knows of."""
        sub = self.context.socket(zmq.SUB)
        sub.subscribe(topic)
        sub.connect(self.config.endpoint)
        # PUB drops what comes before the subscription: knock with batches of another world.
        async with asyncio.timeout(PATIENCE):
            while not await sub.poll(20):
                self.publisher.publish(KvEventBatch(2**40, 0.0, ()))
        while await sub.poll(50):
            await sub.recv_multipart()
        return sub

    async def replay(self, *request: bytes) -> list[list[bytes]]:
        """Return the answer to a request, without its end marker."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.connect(str(self.config.replay_endpoint))
        await dealer.send_multipart(request)
        answer: list[list[bytes]] = []
        async with asyncio.timeout(PATIENCE):
            while True:
                empty, number, payload = await dealer.recv_multipart()
                assert empty == b""
                if number == END:
                    assert payload == b""
                    return answer
                answer.append([number, payload])


@asynccontextmanager
async def world(**changes: Any) -> AsyncIterator[World]:
    made = World(**changes)
    try:
        yield made
    finally:
        made.context.destroy(linger=0)
        await made.publisher.close()


async def test_a_subscriber_holds_exactly_what_the_cache_holds() -> None:
    async with world(replay_endpoint=None) as w:
        sub, mirror = await w.subscribe(), Mirror()
        for number in range(6):
            w.step(10 * number)
        w.cache.drop_adapter(BASE)
        w.step(500)
        async with asyncio.timeout(PATIENCE):
            for number in range(1, 8):
                topic, sequence, payload = await sub.recv_multipart()
                assert topic == b"kv@0@tiny"
                assert sequence == number.to_bytes(8, "big")
                mirror.read_vllm(payload)
        assert sorted(path[-2] for _, _, _, path in mirror.blocks.values()) == [500, 501, 502]


async def test_a_subscriber_of_another_topic_hears_nothing() -> None:
    async with world() as w:
        mine = await w.subscribe()
        other = w.context.socket(zmq.SUB)
        other.subscribe("kv@1@")
        other.connect(w.config.endpoint)
        w.step(0)
        async with asyncio.timeout(PATIENCE):
            await mine.recv_multipart()
        assert not await other.poll(100)


async def test_who_comes_late_is_told_what_was_missed() -> None:
    async with world() as w:
        for number in range(20):
            w.step(10 * number)
        sub, mirror = await w.subscribe(), Mirror()
        w.step(900)
        async with asyncio.timeout(PATIENCE):
            _, sequence, payload = await sub.recv_multipart()
        missed = await w.replay(b"", (0).to_bytes(8, "big"))
        numbers = [int.from_bytes(number, "big") for number, _ in missed]
        kept = [payload for number, payload in missed if number < sequence]
        assert numbers[:21] == list(range(21))
        for part in kept:
            mirror.read_vllm(part)
        mirror.read_vllm(payload)
        late, truth = Mirror(), KvEventFeed("model", lambda: 0.0)
        w.cache.contents(truth.observer)
        late.read_all(truth.observer.take())  # type: ignore[attr-defined]
        expected = {int(name[-16:], 16): rest for name, rest in late.blocks.items()}
        assert mirror.blocks == expected


async def test_a_replay_begins_where_it_is_asked_to() -> None:
    async with world() as w:
        for number in range(9):
            w.step(10 * number)
        for first, numbers in ((7, [7, 8, 9]), (10, []), (2**63, [])):
            answer = await w.replay(b"", first.to_bytes(8, "big"))
            assert [int.from_bytes(number, "big") for number, _ in answer] == numbers


async def test_what_is_kept_for_replays_is_bounded_in_number_and_in_bytes() -> None:
    async with world(max_kept=5) as w:
        for number in range(30):
            w.step(10 * number)
        answer = await w.replay(b"", bytes(8))
        assert [int.from_bytes(n, "big") for n, _ in answer] == [26, 27, 28, 29, 30]
    size = 0
    async with world(max_kept_bytes=2000) as w:
        for number in range(30):
            w.step(10 * number)
        answer = await w.replay(b"", bytes(8))
        size = sum(len(payload) for _, payload in answer)
        assert 1000 < size <= 2000
        assert answer[-1][0] == (30).to_bytes(8, "big")


@pytest.mark.parametrize(
    "request_",
    [
        (b"",),
        (b"", b"1"),
        (b"", b"123456789"),
        (b"x", bytes(8)),
        (b"", bytes(8), b""),
        (bytes(8),),
        (b"", bytes(MAX_REQUEST_BYTES + 1)),
    ],
)
async def test_a_malformed_request_is_ignored_and_the_next_one_answered(
    request_: tuple[bytes, ...],
) -> None:
    async with world() as w:
        w.step(0)
        bad = w.context.socket(zmq.DEALER)
        bad.connect(str(w.config.replay_endpoint))
        await bad.send_multipart(request_)
        answer = await w.replay(b"", bytes(8))
        assert len(answer) == 2
        assert not await bad.poll(20)


async def test_a_subscriber_that_does_not_read_holds_nobody_up() -> None:
    async with world(max_unsent=10, replay_endpoint=None) as w:
        stuck = w.context.socket(zmq.SUB)
        stuck.rcvhwm = 10
        stuck.subscribe("")
        stuck.connect(w.config.endpoint)
        reader = await w.subscribe()
        for _ in range(5000):  # far more than there is room for
            w.publisher.publish(KvEventBatch(1, 1.5, ()))
        async with asyncio.timeout(PATIENCE):
            number = b""
            while number != (2).to_bytes(8, "big"):
                w.publisher.publish(KvEventBatch(2, 1.5, ()))
                while await reader.poll(10):
                    _, number, _ = await reader.recv_multipart()


async def test_an_endpoint_that_is_taken_is_named() -> None:
    async with world() as w:
        second = KvEventPublisher(KvEventPublisherConfig(endpoint=w.config.endpoint))
        with pytest.raises(OSError, match=w.config.endpoint):
            second.open()
        await second.close()


def test_each_replica_has_a_port_of_its_own() -> None:
    assert offset_port("tcp://127.0.0.1:5557", 0) == "tcp://127.0.0.1:5557"
    assert offset_port("tcp://127.0.0.1:5557", 3) == "tcp://127.0.0.1:5560"
    for wrong in ("ipc:///tmp/x", "tcp://127.0.0.1", "tcp://127.0.0.1:*", "127.0.0.1:1", ""):
        with pytest.raises(ValueError, match="tcp://HOST:PORT"):
            offset_port(wrong, 1)


def test_an_empty_batch_is_a_batch() -> None:
    assert as_vllm(vllm_payload(KvEventBatch(1, 2.0, ()))).events == []
