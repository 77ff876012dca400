"""Events out of a real prefix cache: readers who replay them hold exactly what it holds."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cluster.kv_events import (
    MAX_BATCH_BLOCKS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventBatch,
    KvEventBuffer,
    num_blocks,
    short_hash,
    vllm_payload,
)
from cluster.request import BASE
from cluster.scheduler.kv_cache.events import page_hash
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache.radix_tree import Namespace, PageKey, namespace
from cluster.scheduler.scheduler import Scheduler
from cluster.scheduler.testing.fake_engine import FakeEngine
from tests.cluster.kv_mirror import Mirror, Truth, as_vllm
from tests.cluster.scheduler.conftest import tiny_config

PLAIN = namespace("model", BASE, "")
ADAPTED = namespace("model", "a" * 64, "")
SALTED = namespace("model", BASE, "salt")
UNSALTED = {PLAIN.key, ADAPTED.key}


def pages(count: int, start: int = 0) -> tuple[PageKey, ...]:
    return tuple((start + n, start + n + 1) for n in range(count))


def page_hashes(parent: bytes, keys: tuple[PageKey, ...]) -> tuple[bytes, ...]:
    names = []
    for key in keys:
        parent = page_hash(parent, key)
        names.append(parent)
    return tuple(names)


def store(buffer: KvEventBuffer, space: Namespace, keys: tuple[PageKey, ...]) -> tuple[bytes, ...]:
    hashes = page_hashes(space.key, keys)
    buffer.stored(space, space.key, hashes, keys, "device")
    return hashes


def test_a_chain_that_is_stored_piece_by_piece_is_one_event() -> None:
    buffer, keys = KvEventBuffer("model"), pages(5)
    names = page_hashes(PLAIN.key, keys)
    buffer.stored(PLAIN, PLAIN.key, names[:2], keys[:2], "device")
    buffer.stored(PLAIN, names[1], names[2:3], keys[2:3], "device")
    buffer.stored(PLAIN, names[2], names[3:], keys[3:], "device")
    assert buffer.take() == [
        BlockStored(
            names, None, tuple(t for key in keys for t in key), 2, "GPU", None, PLAIN.key, False
        )
    ]
    assert buffer.take() == []


def test_what_does_not_continue_the_last_chain_is_an_event_of_its_own() -> None:
    buffer = KvEventBuffer("model")
    first, keys = store(buffer, PLAIN, pages(2)), pages(1, 50)
    branch = page_hashes(first[0], keys)
    buffer.stored(PLAIN, first[0], branch, keys, "device")  # a sibling of the second page
    buffer.stored(PLAIN, branch[0], (first[1],), pages(1, 70), "host")  # another tier
    events = buffer.take()
    assert [event.block_hashes for event in events if isinstance(event, BlockStored)] == [
        first,
        branch,
        (first[1],),
    ]
    assert [event.medium for event in events if isinstance(event, BlockStored)] == [
        "GPU",
        "GPU",
        "CPU",
    ]


def test_removals_are_joined_but_never_across_a_store() -> None:
    buffer = KvEventBuffer("model")
    names = store(buffer, PLAIN, pages(3))
    buffer.removed(PLAIN, names[2:], "device")
    buffer.removed(PLAIN, names[1:2], "device")
    buffer.stored(PLAIN, names[0], names[1:2], pages(1, 1), "device")
    buffer.removed(PLAIN, names[1:2], "device")
    kinds = [type(event).__name__ for event in buffer.take()]
    assert kinds == ["BlockStored", "BlockRemoved", "BlockStored", "BlockRemoved"]


def test_a_cleared_cache_makes_what_was_noted_before_void() -> None:
    buffer = KvEventBuffer("model")
    store(buffer, PLAIN, pages(3))
    buffer.cleared()
    again = store(buffer, PLAIN, pages(1))
    cleared, stored = buffer.take()
    assert cleared == AllBlocksCleared()
    assert isinstance(stored, BlockStored) and stored.block_hashes == again


def test_an_event_names_its_adapter_and_its_salt() -> None:
    buffer = KvEventBuffer("model")
    for space in (PLAIN, ADAPTED, SALTED):
        store(buffer, space, pages(2))
    payload = vllm_payload(KvEventBatch(7, 1.5, tuple(buffer.take())))
    plain, adapted, salted = as_vllm(payload).events
    assert (plain.lora_name, plain.extra_keys) == (None, None)  # type: ignore[union-attr]
    assert (adapted.lora_name, adapted.extra_keys) == ("a" * 64, None)  # type: ignore[union-attr]
    assert salted.lora_name is None  # type: ignore[union-attr]
    assert salted.extra_keys == [(SALTED.key.hex(),)] * 2  # type: ignore[union-attr]


def test_equal_prompts_in_different_namespaces_have_no_hash_in_common() -> None:
    buffer = KvEventBuffer("model")
    names = [store(buffer, space, pages(4)) for space in (PLAIN, ADAPTED, SALTED)]
    assert len({name for chain in names for name in chain}) == 12
    assert len({short_hash(name) for chain in names for name in chain}) == 12


def test_a_payload_has_the_bytes_that_subscribers_of_vllm_decode() -> None:
    name, parent = bytes(range(32)), bytes(range(32, 64))
    stored = BlockStored((name,), parent, (1, 2), 2, "GPU", None, PLAIN.key, False)
    batch = KvEventBatch(3, 1.5, (stored, BlockRemoved((name,), "CPU"), AllBlocksCleared()))
    ts, events, rank = msgspec.msgpack.decode(vllm_payload(batch))
    assert (ts, rank) == (1.5, 0)
    assert events[0] == {
        "type": "BlockStored",
        "block_hashes": [0x18191A1B1C1D1E1F],
        "parent_block_hash": 0x38393A3B3C3D3E3F,
        "token_ids": [1, 2],
        "block_size": 2,
        "lora_id": None,
        "lora_name": None,
        "medium": "GPU",
        "namespace": PLAIN.key.hex(),
    }
    assert events[1] == {
        "type": "BlockRemoved",
        "block_hashes": [0x18191A1B1C1D1E1F],
        "medium": "CPU",
    }
    assert events[2] == {"type": "AllBlocksCleared"}


def test_no_batch_is_large_and_all_together_tell_the_same() -> None:
    buffer, truth = KvEventBuffer("model"), Truth()
    for space in (PLAIN, ADAPTED):
        keys = pages(3 * MAX_BATCH_BLOCKS + 5)
        names = store(buffer, space, keys)
        truth.stored(space, space.key, names, keys, "device")
    truth.removed(ADAPTED, names[1:], "device")
    buffer.removed(ADAPTED, names[1:], "device")
    mirror, batches = Mirror(), list(buffer.take_batches())
    for batch in batches:
        assert 0 < num_blocks(batch) <= MAX_BATCH_BLOCKS
        mirror.read_all(batch)
    assert len(batches) >= 9
    assert mirror.blocks == truth.seen_outside(UNSALTED)


def test_batches_are_what_was_noted_when_they_were_taken() -> None:
    buffer = KvEventBuffer("model")
    names = store(buffer, PLAIN, pages(2))
    batches = buffer.take_batches()
    buffer.stored(PLAIN, names[-1], (bytes(32),), pages(1, 9), "device")
    (batch,) = batches
    assert num_blocks(batch) == 2
    assert num_blocks(buffer.take()) == 1


class Pair:
    """Two observers of one cache."""

    def __init__(self, *observers: Any) -> None:
        self._observers = observers

    def stored(self, *arguments: Any) -> None:
        for observer in self._observers:
            observer.stored(*arguments)

    def removed(self, *arguments: Any) -> None:
        for observer in self._observers:
            observer.removed(*arguments)


@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from([PLAIN, ADAPTED, SALTED]),
            st.lists(st.integers(0, 1), min_size=1, max_size=6),
            st.sampled_from(["use", "use", "use", "drop", "join"]),
        ),
        max_size=40,
    ),
    num_host_pages=st.sampled_from([0, 3, 20]),
)
def test_a_reader_holds_what_the_cache_holds_in_each_tier(
    calls: list[tuple[Namespace, list[int], str]], num_host_pages: int
) -> None:
    buffer, truth = KvEventBuffer("model"), Truth()
    cache = PrefixCache(8, num_host_pages, Pair(buffer, truth))
    mirror = Mirror()
    for step, (space, tokens, call) in enumerate(calls, start=1):
        if call == "drop":
            cache.drop_adapter(space.adapter)
        elif call == "join":  # a reader that comes late, with what the others have read
            mirror.read_all(buffer.take())
            mirror, late = Mirror(), KvEventBuffer("model")
            cache.contents(late)
            mirror.read_all(late.take())
        else:
            keys = [(token, 7) for token in tokens]
            node = cache.lock(cache.match(space, keys), step)
            cache.restore(node, step)
            match = cache.match(space, keys)
            new = cache.allocate(len(keys) - len(match.pages))
            node, refused = cache.insert(node, keys[len(match.pages) :], new, step)
            assert not refused
            cache.unlock(node, step)
            cache.take_copies()
        mirror.read_all(buffer.take())
        cache.check([])
        assert mirror.blocks == truth.seen_outside(UNSALTED)


def test_a_scheduler_that_preempts_unloads_and_uses_host_pages_is_mirrored() -> None:
    config = tiny_config(num_pages=12, num_host_pages=10, max_model_len=48)
    buffer, truth, mirror = KvEventBuffer("model"), Truth(), Mirror()
    engine = FakeEngine(config)
    engine.scheduler = Scheduler(config, Pair(buffer, truth))
    held = set()
    for round_ in range(6):
        for number in range(4):
            start = 10 * (number % 3)
            adapter = ["A", BASE, "B"][number % 3]
            engine.add(tuple(range(start, start + 12)), 9, adapter, salt="s" * (round_ % 2))
        while not engine.is_idle:
            engine.step()
            mirror.read_all(buffer.take())
            held |= {medium for medium, *_ in mirror.blocks.values()}
        engine.unload("A")
        engine.step()
        mirror.read_all(buffer.take())
        assert mirror.blocks == truth.seen_outside(
            {namespace("model", adapter, "").key for adapter in ("A", "B", BASE)}
        )
        assert mirror.blocks and all(adapter != "A" for _, adapter, *_ in mirror.blocks.values())
    counters = engine.scheduler.stats().counters
    assert counters.preemptions and counters.saved_pages and counters.restored_pages
    assert held == {"GPU", "CPU"}
