"""Nine mistakes that reviewers found in another engine's prefix cache for many adapters.

Each test is one of them in the order of the review, and fails where the mistake is made.
"""

from collections.abc import Callable

import pytest

from cluster.request import BASE
from cluster.scheduler.kv_cache.events import page_hash
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache.radix_tree import namespace
from cluster.scheduler.testing.fake_engine import FakeEngine
from tests.cluster.scheduler.picture import found, observed, remember, visit
from worker.testing.fake_rank import fake_continuation

MakeEngine = Callable[..., FakeEngine]

PROMPT = tuple(range(13))  # three pages of four and a position more
A_SPACE = namespace("m", "A", "")


def prompt(salt: int, length: int) -> tuple[int, ...]:
    return tuple(salt * 1000 + i for i in range(length))


def test_a_preempted_sequence_leaves_its_pages_to_its_own_namespace_alone(
    make_engine: MakeEngine,
) -> None:
    """Review bug 1."""
    engine = make_engine(num_slots=1, slot_patience=4, drain_steps=2)
    engine.add(prompt(1, 5), 60)  # the foremost, which nobody may preempt
    preempted = engine.add(PROMPT, 40, "A", salt="s")
    engine.step()
    engine.step()
    engine.add(prompt(2, 5), 1, "B")  # waits until A's slot is drained
    while not engine.scheduler.stats().counters.preemptions:
        engine.step()
    text = PROMPT + engine.tokens(preempted)
    num_full = (len(text) - 1) // 4 * 4
    assert num_full > len(PROMPT)
    strangers = [engine.add(text, 1, BASE, salt="s"), engine.add(text, 1, "A")]
    engine.run()
    starts = [start for plan in engine.plans for start in plan.starts if start.seq_id == preempted]
    assert starts[1].num_cached_tokens == num_full
    assert [engine.num_cached_tokens(seq_id) for seq_id in strangers] == [0, 0]
    assert engine.tokens(preempted) == fake_continuation("A", PROMPT, 40)


def test_a_namespace_that_is_wholly_in_host_memory_can_still_be_entered() -> None:
    """Review bug 2."""
    engine, picture = observed(num_pages=8, num_host_pages=8, max_model_len=32)
    engine.add(PROMPT, 1, "A")
    engine.run()
    engine.add(prompt(1, 31), 1)  # takes every page of the device
    engine.run()
    assert (picture.count("A", "device"), picture.count("A", "host")) == (0, 3)
    again = engine.add(PROMPT, 3, "A")
    engine.run()
    assert engine.num_cached_tokens(again) == 12
    assert engine.scheduler.stats().counters.restored_pages == 3
    assert engine.tokens(again) == fake_continuation("A", PROMPT, 3)


def test_pages_of_a_dropped_namespace_are_not_given_out_before_their_last_reader_has_left() -> None:
    """Review bug 3."""
    cache = PrefixCache(8)
    short = remember(cache, A_SPACE, "ab", 1)
    long = remember(cache, A_SPACE, "abcd", 2)
    visit(cache, A_SPACE, "abcdxy", 3)
    read = {page for node in long.path() for page in node.pages}
    assert cache.drop_adapter("A") == 2  # only what nobody reads
    cache.unlock(short, 4)
    given = cache.allocate(cache.num_available)
    assert len(given) == 4 and not read & set(given)
    cache.check(given + sorted(read))
    cache.unlock(long, 5)
    assert cache.num_available == 4
    cache.check(given)


def test_a_request_that_could_not_be_admitted_counts_for_no_slot(make_engine: MakeEngine) -> None:
    """Review bug 4."""
    engine = make_engine(num_pages=8, num_slots=1, max_model_len=32, slot_patience=1000)
    engine.add(prompt(1, 12), 16)
    engine.step()
    too_long = engine.add(prompt(2, 16), 1, "A")
    for _ in range(5):
        engine.step()
        (slot,) = engine.scheduler.stats().slots
        assert (slot.adapter, slot.leases) == ("A", 0)
    engine.add(prompt(3, 1), 1, "B")
    engine.abort(too_long)
    engine.step()  # nobody has run on the slot: it goes to who wants it, at once
    assert [slot.adapter for slot in engine.scheduler.stats().slots] == ["B"]
    engine.run()
    assert engine.finish_reason(3) == "length"


def test_equal_pages_of_different_namespaces_have_different_names_at_every_depth() -> None:
    """Review bug 5."""
    engine, picture = observed()
    spaces = ((BASE, ""), ("A", ""), ("B", ""), ("A", "s"), (BASE, "A"))
    for adapter, salt in spaces:
        engine.add(PROMPT, 1, adapter, salt=salt)
    engine.run()
    assert [len(picture.names(adapter, salt)) for adapter, salt in spaces] == [3] * 5
    assert len(picture.where) == 15


def test_an_unload_tells_of_every_page_that_goes_with_the_namespace_and_of_no_other() -> None:
    """Review bug 6."""
    engine, picture = observed(num_pages=8, num_host_pages=8)
    for adapter, salt, text in (("A", "", PROMPT), ("A", "s", PROMPT), (BASE, "", prompt(1, 13))):
        engine.add(text, 1, adapter, salt=salt)
        engine.run()
    assert picture.count("A", "device") > 0 and picture.count("A", "host") > 0
    others = picture.names(BASE)
    assert len(others) == 3
    engine.unload("A")
    engine.step()
    assert [gone.digest for gone in engine.unloaded] == ["A"]
    assert list(picture.where) == others


def test_pages_computed_later_are_told_under_the_adapter_and_behind_those_before_them() -> None:
    """Review bug 7."""
    engine, picture = observed(max_chunk=8)
    seq_id = engine.add(PROMPT, 12, "A")  # two chunks, then an answer of three more pages
    engine.run()
    text = PROMPT + engine.tokens(seq_id)
    chain = [namespace("model", "A", "").key]
    for start in range(0, 24, 4):
        chain.append(page_hash(chain[-1], text[start : start + 4]))
    assert len(picture.stores) >= 3
    told = 0
    for space, parent, names, _ in picture.stores:
        assert space.adapter == "A"
        assert [parent, *names] == chain[told : told + len(names) + 1]
        told += len(names)
    assert told == 6


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("adapter", [BASE, "A"])
def test_a_match_that_is_cut_back_to_the_root_begins_at_position_zero(
    make_engine: MakeEngine, adapter: str, length: int
) -> None:
    """Review bug 8."""
    engine = make_engine()
    for _ in range(2):
        engine.add(PROMPT[:length], 6, adapter)
        engine.run()
    (start,) = engine.plans[-6].starts
    num_cached = (length - 1) // 4 * 4  # nothing at all up to a page: the last token is computed
    assert (start.num_cached_tokens, len(start.pages)) == (num_cached, num_cached // 4)
    (chunk,) = engine.plans[-6].chunks
    assert (chunk.start, len(chunk.token_ids)) == (num_cached, length - num_cached)
    assert engine.tokens(2) == engine.tokens(1)


def test_what_comes_back_from_the_host_comes_back_into_its_own_namespace() -> None:
    """Review bug 9."""
    engine, picture = observed(num_pages=8, num_host_pages=8, max_model_len=32)
    engine.add(PROMPT, 1, "A")
    engine.run()
    names = picture.names("A")
    engine.add(prompt(1, 31), 1)
    engine.run()
    engine.add(PROMPT, 1, "A")
    engine.run()
    assert engine.scheduler.stats().counters.restored_pages == 3
    assert sorted(picture.names("A")) == sorted(names)
    assert picture.count("A", "device") == 3
    base, own = engine.add(PROMPT, 1), engine.add(PROMPT, 1, "A")
    engine.run()
    assert engine.num_cached_tokens(base) == 0
    assert engine.num_cached_tokens(own) == 12


def test_host_pages_of_one_adapter_are_not_found_by_another() -> None:
    """Review bug 9, in the tree."""
    cache = PrefixCache(4, 4)
    visit(cache, A_SPACE, "abcd", 1)
    cache.pool.free(cache.allocate(4))
    assert cache.num_host_cached == 4
    assert found(cache, namespace("m", BASE, ""), "abcd") == 0
    visit(cache, A_SPACE, "abcd", 2)
    assert found(cache, namespace("m", BASE, ""), "abcd") == 0
    assert found(cache, A_SPACE, "abcd") == 4
    cache.check([])
