"""GET /v1/kv_events over real sockets: a real prefix cache behind each fake scheduler."""

import json
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

import cluster.api.routes.admin.kv_events
import cluster.engine.kv_event_feed
from cluster.errors import ErrorInfo
from cluster.messages import KvEventsEnded
from cluster.request import BASE
from cluster.router.testing.fake_scheduler import FakeScheduler
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache.radix_tree import namespace
from tests.cluster.kv_mirror import Mirror
from tests.patience import PATIENCE

PLAIN = namespace("fake base", BASE, "")
ADAPTED = namespace("fake base", "a" * 64, "")


class CachingScheduler(FakeScheduler):
    """A fake scheduler with a real prefix cache that computes what a test asks it to."""

    def __init__(self, replica: str = "0") -> None:
        super().__init__(replica=replica)
        self.cache = PrefixCache(64, 8, self.kv_feed.observer)
        self.kv_feed.attach(self.cache.contents)

    async def compute(self, *starts: int, count: int = 3, space: Any = PLAIN) -> None:
        for start in starts:
            keys = [(start + n, 7) for n in range(count)]
            node = self.cache.lock(self.cache.match(space, keys), 1)
            node, _ = self.cache.insert(node, keys, self.cache.allocate(count), 1)
            self.cache.unlock(node, 1)
            self.kv_feed.flush()

    async def drop(self, adapter: str) -> None:
        self.cache.drop_adapter(adapter)
        self.kv_feed.flush()

    async def flood(self, num_blocks: int) -> None:
        """Tell of more blocks than any cache here has."""
        for number in range(0, num_blocks, 256):
            hashes = tuple(sha256(b"%d" % (number + n)).digest() for n in range(256))
            self.kv_feed.observer.stored(PLAIN, PLAIN.key, hashes, ((1, 2),) * 256, "device")
            self.kv_feed.flush()

    async def content(self) -> dict[str, Any]:
        """Return what a reader of this replica must hold."""
        reader, mirror = cluster.engine.kv_event_feed.KvEventBuffer("fake base"), Mirror()
        self.cache.contents(reader)
        mirror.read_all(reader.take())
        return mirror.blocks


class Stream:
    """What a client of the stream knows, by replica."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.mirrors: dict[str, Mirror] = defaultdict(Mirror)
        self.sequences: dict[str, list[int]] = defaultdict(list)
        self._lines = response.iter_lines()

    def read(self) -> dict[str, Any]:
        """Wait for the next message, apply it and return it."""
        while not (line := next(self._lines)).startswith("data: "):
            pass
        message: dict[str, Any] = json.loads(line.removeprefix("data: "))
        for event in message["events"]:
            self.mirrors[message["replica"]].read(event)
        self.sequences[message["replica"]].append(message["sequence"])
        return message

    def read_comment(self) -> None:
        """Wait for a line that says nothing."""
        while not next(self._lines).startswith(":"):
            pass

    def read_until(self, replica: str, count: int) -> None:
        """Read until so many blocks of a replica are known."""
        while len(self.mirrors[replica].blocks) != count:
            self.read()


@contextmanager
def stream(serving: Any, **headers: str) -> Iterator[Stream]:
    with httpx.stream(
        "GET", f"{serving.url}/v1/kv_events", headers=headers, timeout=PATIENCE
    ) as reply:
        assert reply.status_code == 200, reply.read()
        yield Stream(reply)


def test_a_reader_holds_what_the_cache_holds_from_its_first_message_on(
    serve: Callable[..., Any],
) -> None:
    fake = CachingScheduler()
    serving = serve(fake)
    serving.run(fake.compute(0, 100))
    serving.run(fake.compute(0, 200, space=ADAPTED))
    with stream(serving) as reader:
        assert reader.response.headers["content-type"].startswith("text/event-stream")
        first = reader.read()
        assert (first["replica"], first["sequence"]) == ("0", 0)
        assert first["events"][0] == {"type": "AllBlocksCleared"}
        assert {event.get("lora_name") for event in first["events"][1:]} == {None, "a" * 64}
        assert reader.mirrors["0"].blocks == serving.run(fake.content())
        serving.run(fake.compute(300, 310, 320))
        serving.run(fake.drop(ADAPTED.adapter))
        while reader.sequences["0"][-1] < 4:
            reader.read()
        assert reader.sequences["0"] == [0, 1, 2, 3, 4]
        assert reader.mirrors["0"].blocks == serving.run(fake.content())
        assert len(reader.mirrors["0"].blocks) == 15


def test_all_replicas_are_in_one_stream_and_a_lost_one_is_cleared(
    serve: Callable[..., Any],
) -> None:
    fakes = [CachingScheduler("0"), CachingScheduler("1")]
    serving = serve(*fakes)
    serving.run(fakes[0].compute(0))
    serving.run(fakes[1].compute(0, 100))
    with stream(serving) as reader:
        reader.read_until("0", 3)
        reader.read_until("1", 6)
        serving.run(fakes[1].close())
        cleared = reader.read()
        assert (cleared["replica"], cleared["events"]) == ("1", [{"type": "AllBlocksCleared"}])
        assert (len(reader.mirrors["0"].blocks), len(reader.mirrors["1"].blocks)) == (3, 0)
        back = CachingScheduler("1")
        serving.run(back.compute(50, 60, 70))
        addresses = (serving.backend.addresses[0], serving.run(back.start()))
        serving.schedulers[1] = back
        serving.backend.addresses = addresses
        first = reader.read()
        assert (first["replica"], first["events"][0]["type"]) == ("1", "AllBlocksCleared")
        reader.read_until("1", 9)
        assert reader.mirrors["1"].blocks == serving.run(back.content())
        serving.run(fakes[0].compute(500))
        reader.read_until("0", 6)


def test_a_group_of_ranks_that_starts_again_begins_with_nothing(serve: Callable[..., Any]) -> None:
    fake = CachingScheduler()
    serving = serve(fake)
    serving.run(fake.compute(0))

    async def restart() -> None:
        fake.kv_feed.clear()
        fake.cache = PrefixCache(64, 8, fake.kv_feed.observer)
        fake.kv_feed.attach(fake.cache.contents)

    with stream(serving) as reader:
        reader.read_until("0", 3)
        serving.run(restart())
        reader.read_until("0", 0)
        serving.run(fake.compute(0, 100))
        reader.read_until("0", 6)
        assert reader.sequences["0"] == [0, 1, 2, 3]


def test_two_readers_do_not_know_of_each_other(serve: Callable[..., Any]) -> None:
    fake = CachingScheduler()
    serving = serve(fake)
    with stream(serving) as first:
        serving.run(fake.compute(0))
        with stream(serving) as second:
            second.read_until("0", 3)
            serving.run(fake.compute(100))
            second.read_until("0", 6)
        serving.run(fake.wait_until(lambda fake: fake.kv_feed.num_followers == 1))
        serving.run(fake.compute(200))
        first.read_until("0", 9)


def test_a_client_that_goes_away_is_not_followed_for(serve: Callable[..., Any]) -> None:
    fake = CachingScheduler()
    serving = serve(fake)
    with stream(serving) as reader:
        reader.read()
        assert fake.kv_feed.num_followers == 1
    serving.run(fake.wait_until(lambda fake: fake.kv_feed.num_followers == 0))


def test_a_client_that_does_not_read_is_cut_off_and_holds_no_other_up(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.engine.kv_event_feed, "MAX_BLOCKS_BEHIND", 4096)
    fake = CachingScheduler()
    serving = serve(fake)
    host, port = serving.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(10)
        client.connect((host, int(port)))
        client.sendall(b"GET /v1/kv_events HTTP/1.1\r\nHost: x\r\n\r\n")
        received = client.recv(20)
        assert received.startswith(b"HTTP/1.1 200")
        # The sockets between take some MB before anyone has to wait.
        for _ in range(1000):
            serving.run(fake.flood(256))
            if not fake.kv_feed.num_followers:
                break
        assert not fake.kv_feed.num_followers
        assert serving.client().models.list().data  # other calls go on
        while part := client.recv(1 << 20):
            received = (received + part)[-7:]
    assert not received.endswith(b"0\r\n\r\n")  # not the end of a whole response


def test_a_reader_that_is_let_go_before_its_first_message_learns_why(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = CachingScheduler()
    serving = serve(fake)

    def refuse(line: Any, call_id: int) -> None:
        line.send(KvEventsEnded(call_id, ErrorInfo("NotFound", "KV events are switched off")))

    monkeypatch.setattr(fake.kv_feed, "follow", refuse)
    reply = httpx.get(f"{serving.url}/v1/kv_events")
    assert reply.status_code == 404
    assert reply.json()["error"]["message"] == "KV events are switched off"


def test_a_quiet_stream_shows_signs_of_life(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.api.routes.admin.kv_events, "KEEP_ALIVE_SECONDS", 0.01)
    fake = CachingScheduler()
    serving = serve(fake)
    with stream(serving) as reader:
        reader.read()
        reader.read_comment()
        serving.run(fake.compute(0))
        reader.read_until("0", 3)


def test_there_is_a_limit_on_readers(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.api.routes.admin.kv_events, "MAX_READERS", 2)
    fake = CachingScheduler()
    serving = serve(fake)
    url = f"{serving.url}/v1/kv_events"
    with stream(serving) as one, stream(serving) as two:
        one.read()
        two.read()
        assert httpx.get(url).status_code == 429
    serving.run(fake.wait_until(lambda fake: fake.kv_feed.num_followers == 0))
    with stream(serving) as three:
        three.read()


def test_without_a_scheduler_the_call_is_refused(serve: Callable[..., Any]) -> None:
    reply = httpx.get(f"{serve().url}/v1/kv_events")
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) >= 1


def test_only_an_admin_reads_when_keys_are_on(serve: Callable[..., Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "- {key: admin-key-1, tenant: ops, adapters: '*', admin: true}\n"
        "- {key: users-key-1, tenant: users, adapters: '*'}\n"
    )
    serving = serve(CachingScheduler(), api_key_file=str(keys))
    url = f"{serving.url}/v1/kv_events"
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers={"Authorization": "Bearer users-key-1"}).status_code == 403
    with stream(serving, Authorization="Bearer admin-key-1") as reader:
        assert reader.read()["replica"] == "0"


def test_a_snapshot_of_many_batches_arrives_whole(
    serve: Callable[..., Any],
) -> None:
    fake = CachingScheduler()
    fake.cache = PrefixCache(4000, 0, fake.kv_feed.observer)
    fake.kv_feed.attach(fake.cache.contents)
    serving = serve(fake)
    serving.run(fake.compute(*range(0, 4000, 10), count=10))
    with stream(serving) as reader:
        reader.read_until("0", 4000)
        assert reader.sequences["0"] == [0] * 16
        assert reader.mirrors["0"].blocks == serving.run(fake.content())
