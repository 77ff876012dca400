"""Pages that go to host memory and come back."""

import pytest

from cluster.errors import Conflict
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache.radix_tree import Namespace, Node, PageKey, namespace
from worker.protocol import PageCopy

BASE_SPACE = namespace("m", "base", "")
A_SPACE = namespace("m", "A", "")


def keys_of(word: str) -> list[PageKey]:
    return [(ord(letter), 0) for letter in word]


def remember(cache: PrefixCache, space: Namespace, word: str, step: int) -> Node:
    """Compute a word the way a sequence does, and stay locked on it."""
    keys = keys_of(word)
    match = cache.match(space, keys)
    node = cache.lock(match, step)
    cache.restore(node, step)
    pages = cache.allocate(len(keys) - match.num_pages)
    node, refused = cache.insert(node, keys[match.num_pages :], pages, step)
    cache.pool.free(refused)
    return node


def forget(cache: PrefixCache, num_pages: int) -> None:
    """Let the cache give up pages on the device."""
    cache.pool.free(cache.allocate(num_pages))


def on_tiers(cache: PrefixCache, space: Namespace, word: str) -> tuple[int, int]:
    """How many leading pages are found on the device, and how many behind them on the host."""
    match = cache.match(space, keys_of(word))
    return len(match.pages), match.num_host_pages


def saved(source: int, target: int) -> PageCopy:
    return PageCopy("save", source, target, 2)


def restored(source: int, target: int) -> PageCopy:
    return PageCopy("restore", source, target, 2)


def test_an_evicted_suffix_is_saved_and_still_found_behind_its_prefix() -> None:
    cache = PrefixCache(4, 4)
    cache.unlock(remember(cache, BASE_SPACE, "abcd", 1), 1)
    forget(cache, 2)
    match = cache.match(BASE_SPACE, keys_of("abcd"))
    assert (match.pages, match.num_host_pages, match.num_pages) == ((0, 1), 2, 4)
    assert match.num_unlocked == 2
    assert cache.take_copies() == (saved(2, 0), saved(3, 1))
    assert cache.take_copies() == ()
    assert (cache.counters.evicted_pages, cache.counters.saved_pages, cache.num_host_cached) == (
        2,
        2,
        2,
    )
    cache.check([])


def test_what_was_saved_comes_back_in_path_order() -> None:
    cache = PrefixCache(4, 4)
    cache.unlock(remember(cache, BASE_SPACE, "abcd", 1), 1)
    forget(cache, 3)
    cache.take_copies()
    node = cache.lock(cache.match(BASE_SPACE, keys_of("abcd")), 2)
    cache.check([])
    assert cache.restore(node, 2) == [1, 2, 3]
    assert cache.take_copies() == (restored(0, 1), restored(1, 2), restored(2, 3))
    assert cache.match(BASE_SPACE, keys_of("abcd")).pages == (0, 1, 2, 3)
    assert (cache.host_pool.num_free, cache.counters.restored_pages, cache.num_locked) == (4, 3, 4)
    cache.check([])
    cache.unlock(node, 3)
    cache.check([])


def test_a_prefix_that_is_on_the_device_needs_no_copy() -> None:
    cache = PrefixCache(4, 4)
    cache.unlock(remember(cache, BASE_SPACE, "ab", 1), 1)
    node = cache.lock(cache.match(BASE_SPACE, keys_of("ab")), 2)
    assert cache.restore(node, 2) == []
    assert cache.take_copies() == ()


def test_only_the_part_that_matches_comes_back() -> None:
    cache = PrefixCache(4, 4)
    cache.unlock(remember(cache, BASE_SPACE, "abcd", 1), 1)
    forget(cache, 4)
    cache.unlock(remember(cache, BASE_SPACE, "abx", 2), 2)
    assert on_tiers(cache, BASE_SPACE, "abcd") == (2, 2)
    assert on_tiers(cache, BASE_SPACE, "abx") == (3, 0)
    cache.check([])


def test_making_room_for_what_comes_back_may_save_something_else() -> None:
    cache = PrefixCache(3, 3)
    cache.unlock(remember(cache, BASE_SPACE, "abc", 1), 1)
    cache.unlock(remember(cache, A_SPACE, "xyz", 2), 2)
    assert cache.take_copies() == (saved(0, 0), saved(1, 1), saved(2, 2))
    node = cache.lock(cache.match(BASE_SPACE, keys_of("ab")), 3)
    assert cache.restore(node, 3) == [1, 2]
    # Pages 0 and 1 of the host are locked, so that of "c" went for "y", and "z" found no room.
    assert cache.take_copies() == (saved(1, 2), restored(0, 1), restored(1, 2))
    assert on_tiers(cache, A_SPACE, "xyz") == (1, 1)
    assert on_tiers(cache, BASE_SPACE, "abc") == (2, 0)
    cache.check([])


def test_a_fork_is_copied_in_its_turn_among_the_others() -> None:
    cache = PrefixCache(2, 2)
    cache.unlock(remember(cache, BASE_SPACE, "ab", 1), 1)
    (page,) = cache.allocate(1)
    fork = PageCopy("fork", 0, page, 1)
    cache.note(fork)
    other = cache.allocate(1)
    assert cache.take_copies() == (saved(1, 0), fork, saved(0, 1))
    cache.check([page, *other])


def test_a_full_host_drops_its_least_recently_used_page_suffix_first() -> None:
    cache = PrefixCache(4, 3)
    cache.unlock(remember(cache, BASE_SPACE, "ab", 1), 1)
    cache.unlock(remember(cache, A_SPACE, "xy", 2), 2)
    forget(cache, 4)
    assert on_tiers(cache, BASE_SPACE, "ab") == (0, 1)
    assert on_tiers(cache, A_SPACE, "xy") == (0, 2)
    assert (cache.counters.saved_pages, cache.counters.evicted_host_pages) == (4, 1)
    cache.check([])


def test_a_run_longer_than_the_host_keeps_its_beginning() -> None:
    cache = PrefixCache(6, 2)
    cache.unlock(remember(cache, BASE_SPACE, "abcdef", 1), 1)
    forget(cache, 6)
    assert on_tiers(cache, BASE_SPACE, "abcdef") == (0, 2)
    assert cache.take_copies() == (saved(0, 0), saved(1, 1))
    cache.check([])
    cache = PrefixCache(6, 2)
    cache.unlock(remember(cache, BASE_SPACE, "abcdef", 1), 1)
    for num_pages in range(1, 7):  # page by page it ends the same
        forget(cache, num_pages)
    assert on_tiers(cache, BASE_SPACE, "abcdef") == (0, 2)
    cache.check([])


def test_a_page_is_dropped_where_the_host_holds_only_locked_ones() -> None:
    cache = PrefixCache(2, 2)
    cache.unlock(remember(cache, BASE_SPACE, "ab", 1), 1)
    forget(cache, 2)
    held = cache.lock(cache.match(BASE_SPACE, keys_of("ab")), 2)
    cache.take_copies()
    cache.unlock(remember(cache, A_SPACE, "x", 3), 3)
    forget(cache, 2)
    assert on_tiers(cache, A_SPACE, "x") == (0, 0)
    assert on_tiers(cache, BASE_SPACE, "ab") == (0, 2)
    assert cache.take_copies() == ()
    cache.check([])
    cache.unlock(held, 4)
    cache.check([])
    assert cache.num_host_cached == 2


def test_a_prefix_may_be_saved_while_its_suffixes_are_on_the_host() -> None:
    cache = PrefixCache(4, 8)
    cache.unlock(remember(cache, BASE_SPACE, "abc", 1), 1)
    cache.unlock(remember(cache, BASE_SPACE, "abd", 2), 2)
    forget(cache, 2)
    assert on_tiers(cache, BASE_SPACE, "abc") == (2, 1)
    forget(cache, 4)
    assert on_tiers(cache, BASE_SPACE, "abc") == (0, 3)
    assert on_tiers(cache, BASE_SPACE, "abd") == (0, 3)
    cache.check([])
    cache.unlock(remember(cache, BASE_SPACE, "abc", 3), 3)
    assert on_tiers(cache, BASE_SPACE, "abd") == (2, 1)
    cache.check([])


def test_a_run_that_is_saved_page_by_page_stays_in_one_piece() -> None:
    cache = PrefixCache(64, 64)
    word = "".join(chr(letter) for letter in range(64))
    cache.unlock(remember(cache, BASE_SPACE, word, 1), 1)
    for num_pages in range(1, 41):
        forget(cache, num_pages)
        cache.check([])
    (tree,) = cache._trees
    assert [(n.num_pages, n.is_on_host) for n in tree.nodes()] == [(24, False), (40, True)]
    for num_pages in range(41, 65):
        forget(cache, num_pages)
    assert [(n.num_pages, n.is_on_host) for n in tree.nodes()] == [(64, True)]
    cache.check([])


def test_a_page_computed_again_takes_the_place_of_the_saved_one() -> None:
    cache = PrefixCache(8, 4)
    first = cache.lock(cache.match(BASE_SPACE, keys_of("abc")), 1)
    copies = cache.allocate(3)
    cache.unlock(remember(cache, BASE_SPACE, "abc", 1), 1)
    forget(cache, 5)
    cache.take_copies()
    assert on_tiers(cache, BASE_SPACE, "abc") == (0, 3)
    first, refused = cache.insert(first, keys_of("abc"), copies, 2)
    assert refused == []
    assert cache.match(BASE_SPACE, keys_of("abc")).pages == tuple(copies)
    assert (cache.host_pool.num_free, cache.counters.restored_pages, cache.take_copies()) == (
        4,
        0,
        (),
    )
    cache.check([])
    cache.unlock(first, 3)
    cache.check([])


def test_where_only_the_suffix_was_saved_the_prefix_on_the_device_is_refused() -> None:
    cache = PrefixCache(8, 4)
    first = cache.lock(cache.match(BASE_SPACE, keys_of("abcd")), 1)
    copies = cache.allocate(4)
    cache.unlock(remember(cache, BASE_SPACE, "abc", 1), 1)
    forget(cache, 2)
    assert on_tiers(cache, BASE_SPACE, "abc") == (2, 1)
    first, refused = cache.insert(first, keys_of("abcd"), copies, 2)
    assert refused == copies[:2]
    assert on_tiers(cache, BASE_SPACE, "abcd") == (4, 0)
    cache.check(refused)


def test_a_restored_prefix_goes_by_its_new_use() -> None:
    cache = PrefixCache(2, 2)
    cache.unlock(remember(cache, BASE_SPACE, "a", 1), 1)
    cache.unlock(remember(cache, A_SPACE, "x", 2), 2)
    forget(cache, 1)
    cache.unlock(remember(cache, BASE_SPACE, "a", 3), 3)
    forget(cache, 1)
    assert on_tiers(cache, BASE_SPACE, "a") == (1, 0)
    assert on_tiers(cache, A_SPACE, "x") == (0, 1)


def test_what_comes_back_stays_in_the_namespace_it_came_from() -> None:
    cache = PrefixCache(4, 4)
    cache.unlock(remember(cache, A_SPACE, "ab", 1), 1)
    forget(cache, 4)
    cache.unlock(remember(cache, A_SPACE, "ab", 2), 2)
    assert on_tiers(cache, A_SPACE, "ab") == (2, 0)
    assert on_tiers(cache, BASE_SPACE, "ab") == (0, 0)
    assert on_tiers(cache, namespace("m", "A", "salt"), "ab") == (0, 0)


def test_device_eviction_takes_the_same_pages_with_and_without_a_host() -> None:
    left: list[list[int]] = []
    for num_host_pages in (0, 2, 100):
        cache = PrefixCache(12, num_host_pages)
        for step, word in enumerate(["abcd", "abxy", "pqr", "pst"], start=5):
            cache.unlock(remember(cache, BASE_SPACE, word, step // 2), step // 2)
        found = []
        for num_pages in range(1, 13):
            forget(cache, num_pages)
            found += [on_tiers(cache, BASE_SPACE, w)[0] for w in ("abcd", "abxy", "pqr", "pst")]
        left.append(found)
    assert left[0] == left[1] == left[2]


def test_a_dropped_adapter_leaves_no_page_on_either_tier() -> None:
    cache = PrefixCache(8, 8)
    cache.unlock(remember(cache, A_SPACE, "abcd", 1), 1)
    cache.unlock(remember(cache, namespace("m", "A", "salt"), "x", 2), 2)
    cache.unlock(remember(cache, BASE_SPACE, "y", 3), 3)
    forget(cache, 5)
    assert on_tiers(cache, A_SPACE, "abcd") == (1, 3)
    assert cache.drop_adapter("A") == 2
    assert cache.counters.dropped_host_pages == 3
    assert (cache.pool.num_free, cache.host_pool.num_free) == (7, 8)
    assert on_tiers(cache, A_SPACE, "abcd") == (0, 0)
    assert cache.drop_adapter("A") == 0
    cache.check([])


def test_locked_host_pages_of_a_dropped_adapter_are_freed_when_unlocked() -> None:
    cache = PrefixCache(4, 4)
    cache.unlock(remember(cache, A_SPACE, "abcd", 1), 1)
    forget(cache, 3)
    held = cache.lock(cache.match(A_SPACE, keys_of("abc")), 2)
    assert cache.drop_adapter("A") == 0
    assert (cache.counters.dropped_host_pages, cache.host_pool.num_free) == (1, 2)
    cache.check([0], [0, 1])
    cache.unlock(held, 3)
    assert (cache.pool.num_free, cache.host_pool.num_free) == (4, 4)
    cache.check([])


def test_clearing_is_refused_while_a_prefix_is_held_and_changes_nothing() -> None:
    cache = PrefixCache(4, 4)
    cache.unlock(remember(cache, A_SPACE, "xyz", 1), 1)
    held = remember(cache, BASE_SPACE, "ab", 2)
    with pytest.raises(Conflict, match="1 running"):
        cache.clear()
    assert on_tiers(cache, A_SPACE, "xyz") == (2, 1)
    assert on_tiers(cache, BASE_SPACE, "ab") == (2, 0)
    cache.check([])
    cache.unlock(held, 3)
    empty = cache.lock(cache.match(A_SPACE, []), 3)  # holds no page, but will put some below
    with pytest.raises(Conflict):
        cache.clear()
    cache.unlock(empty, 3)
    cache.clear()
    assert (cache.pool.num_free, cache.host_pool.num_free) == (4, 4)
    assert on_tiers(cache, A_SPACE, "xyz") == (0, 0)
    cache.check([])
    cache.unlock(remember(cache, A_SPACE, "xyz", 4), 4)
    assert on_tiers(cache, A_SPACE, "xyz") == (3, 0)


def test_pages_cannot_be_put_behind_a_prefix_that_is_not_on_the_device() -> None:
    cache = PrefixCache(2, 2)
    cache.unlock(remember(cache, BASE_SPACE, "a", 1), 1)
    forget(cache, 2)
    node = cache.lock(cache.match(BASE_SPACE, keys_of("a")), 2)
    with pytest.raises(AssertionError, match="not restored"):
        cache.insert(node, keys_of("b"), cache.allocate(1), 2)


def test_namespaces_do_not_pile_up_on_the_host() -> None:
    cache = PrefixCache(4, 3)
    for salt in range(100):
        space = namespace("m", "base", str(salt))
        cache.unlock(remember(cache, space, "ab", salt + 1), salt + 1)
    assert len(list(cache._trees)) == 4  # 7 pages, and the oldest has lost its suffix
    cache.check([])
