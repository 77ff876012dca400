"""The feed between one cache and many readers: snapshots, order, and readers that are slow."""

import pytest

import cluster.engine.kv_event_feed
from cluster.engine.kv_event_feed import MAX_UNTAKEN, KvEventFeed
from cluster.kv_events import MAX_BATCH_BLOCKS, AllBlocksCleared, KvEventBatch, vllm_payload
from cluster.messages import KvEvents, KvEventsEnded, decode_scheduler_frame, encode
from cluster.request import BASE
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache.radix_tree import namespace
from tests.cluster.kv_mirror import Mirror

PLAIN = namespace("model", BASE, "")
ADAPTED = namespace("model", "a" * 64, "")


class Reader:
    """A follower that takes batches only when it is told to, over encoded frames."""

    def __init__(self, feed: KvEventFeed, call_id: int = 1) -> None:
        self.mirror = Mirror()
        self.sequences: list[int] = []
        self.untaken: list[KvEventBatch] = []
        self.ended: KvEventsEnded | None = None
        self.most_untaken = 0
        self._feed = feed
        self._call_id = call_id

    def send(self, message: KvEvents | KvEventsEnded) -> None:
        frame = decode_scheduler_frame(encode(message))
        if isinstance(frame, KvEventsEnded):
            self.ended = frame
            return
        assert isinstance(frame, KvEvents) and frame.call_id == self._call_id
        self.untaken.append(frame.batch)
        self.most_untaken = max(self.most_untaken, len(self.untaken))

    def follow(self) -> "Reader":
        self._feed.follow(self, self._call_id)
        return self

    def take(self, count: int = 1_000_000) -> None:
        while self.untaken and count:
            batch = self.untaken.pop(0)
            self.mirror.read_all(batch.events)
            self.sequences.append(batch.sequence)
            self._feed.taken(self, self._call_id)
            count -= 1


class Paper:
    """A publisher that prints."""

    def __init__(self) -> None:
        self.batches: list[KvEventBatch] = []

    def publish(self, batch: KvEventBatch) -> None:
        self.batches.append(batch)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def compute(cache: PrefixCache, start: int, count: int, space: object = PLAIN) -> None:
    """Have a sequence of `count` pages pass through the cache."""
    keys = [(start + n, 7) for n in range(count)]
    match = cache.match(space, keys)  # type: ignore[arg-type]
    node = cache.lock(match, 1)
    cache.restore(node, 1)
    num_there = match.num_pages
    node, _ = cache.insert(node, keys[num_there:], cache.allocate(count - num_there), 1)
    cache.unlock(node, 1)


def new_feed(publisher: Paper | None = None) -> KvEventFeed:
    feed = KvEventFeed("model", Clock(), publisher)
    feed.clear()
    return feed


def new_cache(feed: KvEventFeed, num_pages: int, num_host_pages: int) -> PrefixCache:
    cache = PrefixCache(num_pages, num_host_pages, feed.observer)
    feed.attach(cache.contents)
    return cache


def test_a_late_reader_begins_with_a_snapshot_and_goes_on_without_a_gap() -> None:
    feed = new_feed()
    cache = new_cache(feed, 64, 8)
    first = Reader(feed).follow()
    compute(cache, 0, 5)
    feed.flush()
    compute(cache, 100, 3, ADAPTED)  # noted and not sent yet when the second one comes
    second = Reader(feed).follow()
    compute(cache, 200, 4)
    feed.flush()
    cache.drop_adapter(ADAPTED.adapter)
    feed.flush()
    first.take()
    second.take()
    assert len(second.mirror.blocks) == 9
    assert second.mirror.blocks == first.mirror.blocks
    assert first.sequences == [0, 1, 2, 3, 4]
    assert second.sequences == [2, 3, 4]


def test_a_snapshot_is_sent_in_pieces_while_steps_go_on() -> None:
    feed = new_feed()
    cache = new_cache(feed, 20_000, 0)
    early = Reader(feed).follow()
    compute(cache, 0, 15 * MAX_BATCH_BLOCKS)
    feed.flush()
    late = Reader(feed).follow()
    for number in range(20):
        compute(cache, 10_000 * (number + 1), 2)
        if number == 10:
            cache.drop_adapter(BASE)
        feed.flush()
        late.take(1)
        early.take()
    late.take()
    assert late.mirror.blocks == early.mirror.blocks
    assert len(late.mirror.blocks) == 18  # of the nine prompts after the drop
    assert late.most_untaken <= MAX_UNTAKEN
    assert late.sequences == sorted(late.sequences)
    assert set(late.sequences) == set(early.sequences[-len(set(late.sequences)) :])


def test_a_reader_that_takes_nothing_is_sent_little_and_let_go_at_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster.engine.kv_event_feed, "MAX_BLOCKS_BEHIND", 100)
    feed = new_feed()
    cache = new_cache(feed, 10_000, 0)
    stuck, quick = Reader(feed).follow(), Reader(feed).follow()
    for number in range(60):
        compute(cache, 10 * number, 4)
        feed.flush()
        quick.take()
    assert len(stuck.untaken) == MAX_UNTAKEN
    assert stuck.ended is not None and stuck.ended.error.name == "Overloaded"
    assert quick.ended is None and len(quick.mirror.blocks) == 240
    assert feed.num_followers == 1
    stuck.take()  # what it says after its end is ignored
    assert stuck.untaken == []


def test_a_slow_reader_below_the_bound_gets_everything_in_order() -> None:
    feed = new_feed()
    cache = new_cache(feed, 1000, 0)
    slow = Reader(feed).follow()
    for number in range(100):
        compute(cache, 10 * number, 2)
        feed.flush()
    assert len(slow.untaken) == MAX_UNTAKEN
    slow.take()
    assert slow.sequences == list(range(101))
    assert len(slow.mirror.blocks) == 200


def test_a_new_group_of_ranks_begins_with_nothing() -> None:
    feed = new_feed()
    cache = new_cache(feed, 64, 0)
    reader = Reader(feed).follow()
    compute(cache, 0, 5)
    feed.flush()
    compute(cache, 50, 5)  # the step that the ranks died in
    feed.clear()
    cache.drop_adapter(BASE)  # what is left of the scheduler comes to its end
    feed.flush()
    reader.take()
    assert reader.mirror.blocks == {}
    assert Reader(feed).follow().untaken[0].events == (AllBlocksCleared(),)
    cache = new_cache(feed, 64, 0)
    compute(cache, 0, 2)
    feed.flush()
    reader.take()
    assert len(reader.mirror.blocks) == 2


def test_a_connection_that_has_gone_is_sent_nothing() -> None:
    feed = new_feed()
    cache = new_cache(feed, 64, 0)
    gone, unfollowed, other = (Reader(feed).follow() for _ in range(3))
    feed.forget(gone)
    feed.unfollow(unfollowed, 1)
    feed.unfollow(unfollowed, 1)  # again: nothing happens
    compute(cache, 0, 2)
    feed.flush()
    counts = [len(reader.untaken) for reader in (gone, unfollowed, other)]
    assert counts == [1, 1, 2]


def test_one_connection_can_carry_two_calls() -> None:
    feed = new_feed()
    cache = new_cache(feed, 64, 0)
    seen: list[tuple[int, int]] = []

    class Line:
        def send(self, message: KvEvents | KvEventsEnded) -> None:
            assert isinstance(message, KvEvents)
            seen.append((message.call_id, message.batch.sequence))

    line = Line()
    feed.follow(line, 1)
    feed.follow(line, 2)
    compute(cache, 0, 2)
    feed.flush()
    feed.unfollow(line, 1)
    compute(cache, 50, 2)
    feed.flush()
    assert seen == [(1, 0), (2, 0), (1, 1), (2, 1), (2, 2)]


def test_the_publisher_is_told_everything_from_an_empty_beginning() -> None:
    paper = Paper()
    feed = new_feed(paper)
    cache = new_cache(feed, 8, 4)
    mirror = Mirror()
    for number in range(10):
        compute(cache, 10 * number, 3)
        feed.flush()
    reader = Reader(feed).follow()
    reader.take()
    assert paper.batches[0].events == (AllBlocksCleared(),)
    assert [batch.sequence for batch in paper.batches] == list(range(11))
    assert reader.sequences == [10]
    for batch in paper.batches:
        mirror.read_vllm(vllm_payload(batch))
    expected = {int(name[-16:], 16): rest for name, rest in reader.mirror.blocks.items()}
    assert mirror.blocks == expected
    assert {medium for medium, *_ in mirror.blocks.values()} == {"GPU", "CPU"}


def test_nothing_is_made_while_nobody_reads() -> None:
    feed = new_feed()
    cache = new_cache(feed, 64, 0)
    compute(cache, 0, 2)
    feed.flush()
    compute(cache, 10, 2)
    reader = Reader(feed).follow()
    reader.take()
    assert reader.sequences == [0]
    assert len(reader.mirror.blocks) == 4
