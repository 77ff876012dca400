"""What other engines test of their prefix caches, told of ours: pages, locks and what goes first.

Each test names the case that it is. Whose pages are whose is in `test_upstream_namespace_cases`.
"""

from collections.abc import Callable
from itertools import permutations

import pytest

from cluster.errors import Conflict
from cluster.request import BASE
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache.radix_tree import namespace
from cluster.scheduler.testing.fake_engine import FakeEngine
from tests.cluster.scheduler.picture import forget, found, keys_of, observed, remember, visit
from worker.testing.fake_rank import fake_continuation

MakeEngine = Callable[..., FakeEngine]

BASE_SPACE = namespace("m", BASE, "")
A_SPACE = namespace("m", "A", "")


def prompt(salt: int, length: int) -> tuple[int, ...]:
    return tuple(salt * 1000 + i for i in range(length))


def test_the_least_recently_used_pages_go_first_and_the_last_of_them_before_the_first() -> None:
    """Case 5 (vLLM)."""
    cache = PrefixCache(9)
    for step, word in ((1, "abc"), (2, "def"), (3, "ghi"), (4, "abc")):
        visit(cache, BASE_SPACE, word, step)
    lengths = []
    for _ in range(9):
        forget(cache, cache.pool.num_free + 1)
        lengths.append(tuple(found(cache, BASE_SPACE, word) for word in ("def", "ghi", "abc")))
    assert lengths[:3] == [(2, 3, 3), (1, 3, 3), (0, 3, 3)]
    assert lengths[3:6] == [(0, 2, 3), (0, 1, 3), (0, 0, 3)]
    assert lengths[6:] == [(0, 0, 2), (0, 0, 1), (0, 0, 0)]


def test_the_pages_that_a_request_starts_on_are_not_evicted_for_its_own_new_ones(
    make_engine: MakeEngine,
) -> None:
    """Case 6 (vLLM)."""
    engine = make_engine(num_pages=8, max_model_len=32)
    for salt in (1, 2):
        engine.add(prompt(salt, 13), 1)
        engine.run()
    older = prompt(1, 13)[:12] + prompt(3, 14)  # on the three pages that would go first
    engine.add(older, 1)
    engine.run()
    assert engine.num_cached_tokens(3) == 12
    assert engine.tokens(3) == fake_continuation(None, older, 1)
    engine.add(prompt(2, 13), 1)
    engine.run()
    assert engine.num_cached_tokens(4) < 12  # the others gave way


def test_the_pages_that_a_request_would_start_on_are_no_room_for_it(
    make_engine: MakeEngine,
) -> None:
    """Case 6 (vLLM), when nothing else could go."""
    engine = make_engine(num_pages=8, max_model_len=32)
    engine.add(prompt(1, 13), 1)
    engine.run()
    engine.add(prompt(2, 13), 4)
    engine.step()  # four of its own, three of the first, one free
    engine.add(prompt(1, 20), 1)
    engine.step()
    assert engine.scheduler.stats().num_waiting == 1
    engine.run()
    assert engine.num_cached_tokens(3) == 12
    assert engine.tokens(3) == fake_continuation(None, prompt(1, 20), 1)


def test_a_page_loses_its_old_name_before_it_gets_a_new_one() -> None:
    """Case 7 (vLLM)."""
    engine, picture = observed(num_pages=5, max_model_len=20)
    for salt in range(6):
        engine.add(prompt(salt, 17), 1)
        engine.run()
        assert len(picture.where) <= 5  # never more names than pages
        first = engine.add(prompt(0, 17), 1)
        engine.run()
        assert engine.num_cached_tokens(first) == (16 if salt == 0 else 0)
    assert engine.scheduler.stats().counters.evicted_pages > 0


def _state(cache: PrefixCache) -> tuple[int, ...]:
    num_found = found(cache, A_SPACE, "abcd"), found(cache, BASE_SPACE, "xy")
    return (*num_found, cache.num_available, cache.num_host_cached)


@pytest.mark.parametrize("num_host_pages", [0, 2])
def test_a_cache_that_anybody_reads_is_not_cleared_not_even_in_part(num_host_pages: int) -> None:
    """Cases 10 (vLLM) and 47 (tokenspeed)."""
    cache = PrefixCache(6, num_host_pages)
    visit(cache, A_SPACE, "abcd", 1)
    forget(cache, 4)  # two of them may go to the host
    held = remember(cache, BASE_SPACE, "xy", 2)
    before = _state(cache)
    with pytest.raises(Conflict, match="1 running"):
        cache.clear()
    assert _state(cache) == before
    cache.check([])
    cache.unlock(held, 3)
    cache.clear()
    assert (found(cache, A_SPACE, "a"), found(cache, BASE_SPACE, "x")) == (0, 0)
    assert cache.pool.num_free == 6 and cache.host_pool.num_free == num_host_pages


def test_a_node_splits_under_its_readers_and_each_keeps_what_it_reads() -> None:
    """Case 41 (SGLang)."""
    cache = PrefixCache(8)
    long = remember(cache, BASE_SPACE, "abcd", 1)
    pages = cache.match(BASE_SPACE, keys_of("abcd")).pages
    fork = remember(cache, BASE_SPACE, "abxy", 2)
    assert cache.match(BASE_SPACE, keys_of("abxy")).pages[:2] == pages[:2]
    cache.check([])
    cache.unlock(long, 3)
    assert (cache.num_locked, cache.num_unlocked) == (4, 2)
    forget(cache, cache.num_available)
    assert (found(cache, BASE_SPACE, "abcd"), found(cache, BASE_SPACE, "abxy")) == (2, 4)
    cache.unlock(fork, 4)
    assert cache.num_available == 8
    cache.check([])


@pytest.mark.parametrize(("length", "num_cached"), [(4, 0), (5, 4), (7, 4), (8, 4), (9, 8)])
def test_only_whole_pages_are_shared(make_engine: MakeEngine, length: int, num_cached: int) -> None:
    """Case 41 (SGLang), the partial page."""
    engine = make_engine()
    engine.add(prompt(1, 20), 1)
    engine.run()
    text = prompt(1, length) + (7,) * (length == 7)  # a page that agrees only in part
    engine.add(text, 2)
    engine.run()
    assert engine.num_cached_tokens(2) == num_cached
    assert engine.tokens(2) == fake_continuation(None, text, 2)


def test_a_locked_leaf_stays_and_the_prefix_goes_after_the_last_that_stands_on_it() -> None:
    """Case 43 (tokenspeed)."""
    cache = PrefixCache(6)
    held = remember(cache, BASE_SPACE, "abcd", 1)
    visit(cache, BASE_SPACE, "abxy", 2)
    forget(cache, cache.num_available)
    assert (found(cache, BASE_SPACE, "abcd"), found(cache, BASE_SPACE, "abxy")) == (4, 2)
    cache.unlock(held, 3)
    lengths = []
    for num_free in range(3, 7):
        forget(cache, num_free)
        lengths.append(found(cache, BASE_SPACE, "abcd"))
    assert lengths == [3, 2, 1, 0]
    cache.check([])


def test_a_use_counts_from_the_unlock_and_what_can_go_is_counted_exactly() -> None:
    """Case 43 (tokenspeed), the order."""
    cache = PrefixCache(6)
    counts = [cache.num_available]
    early = remember(cache, BASE_SPACE, "ab", 1)
    counts.append(cache.num_available)
    visit(cache, BASE_SPACE, "cd", 2)
    visit(cache, BASE_SPACE, "ab", 3)  # still locked by the first reader
    counts.append(cache.num_available)
    visit(cache, BASE_SPACE, "ef", 4)
    cache.unlock(early, 5)
    counts.append(cache.num_available)
    assert counts == [6, 4, 4, 6]
    order = []
    while cache.num_unlocked:
        forget(cache, cache.pool.num_free + 2)
        order.append([word for word in ("ab", "cd", "ef") if found(cache, BASE_SPACE, word)])
    assert order == [["ab", "ef"], ["ab"], []]


def test_equally_old_pages_go_in_the_order_in_which_they_came_however_they_were_let_go() -> None:
    """Case 43 (tokenspeed), ties in time."""
    outcomes = set()
    for order in permutations(range(3)):
        cache = PrefixCache(3)
        held = [remember(cache, BASE_SPACE, word, 1) for word in "abc"]
        for at in order:
            cache.unlock(held[at], 2)
        gone = []
        for num_free in (1, 2, 3):
            forget(cache, num_free)
            gone += [w for w in "abc" if w not in gone and not found(cache, BASE_SPACE, w)]
        outcomes.add("".join(gone))
    assert outcomes == {"abc"}


def test_within_one_step_a_suffix_goes_before_its_prefix() -> None:
    """Case 47 (tokenspeed), within an epoch."""
    cache = PrefixCache(6)
    held = [remember(cache, BASE_SPACE, word, 1) for word in ("ab", "abcd", "abxy")]
    for node in held:  # the prefix is let go first
        cache.unlock(node, 2)
    forget(cache, 4)
    assert [found(cache, BASE_SPACE, word) for word in ("ab", "abcd", "abxy")] == [2, 2, 2]


@pytest.mark.parametrize("page_size", [1, 3, 4, 5])
def test_any_page_size_reuses_drops_the_older_prefix_first_and_keeps_adapters_apart(
    make_engine: MakeEngine, page_size: int
) -> None:
    """Case 63 (LoRAX)."""
    num_full = 13 // page_size
    engine = make_engine(num_pages=3 * num_full + 2, page_size=page_size, max_model_len=30)
    for salt, adapter in ((1, BASE), (1, "A"), (2, BASE), (1, BASE)):
        engine.add(prompt(salt, 14), 1, adapter)
        engine.run()
    assert [engine.num_cached_tokens(i) for i in (1, 2, 3)] == [0, 0, 0]
    assert engine.num_cached_tokens(4) == num_full * page_size
    half = num_full // 2 * page_size
    engine.add(prompt(1, half) + prompt(3, 14 - half), 1)  # overlaps in part, and needs room
    engine.run()
    assert engine.num_cached_tokens(5) == half
    for salt, adapter in ((2, BASE), (1, BASE)):
        engine.add(prompt(salt, 14), 1, adapter)
        engine.run()
    assert engine.num_cached_tokens(6) == num_full * page_size  # A's pages were older, and went
    assert engine.num_cached_tokens(7) == num_full * page_size
