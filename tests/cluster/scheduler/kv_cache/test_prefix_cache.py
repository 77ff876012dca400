"""All namespaces over one pool."""

import pytest

from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache.radix_tree import Namespace, Node, PageKey, namespace

BASE_SPACE = namespace("m", "base", "")
A_SPACE = namespace("m", "A", "")


def keys_of(word: str) -> list[PageKey]:
    return [(ord(letter),) for letter in word]


def remember(cache: PrefixCache, space: Namespace, word: str, step: int) -> Node:
    """Compute a word the way a sequence does, and stay locked on it."""
    keys = keys_of(word)
    match = cache.match(space, keys)
    node = cache.lock(match, step)
    done = len(match.pages)
    pages = cache.allocate(len(keys) - done)
    node, refused = cache.insert(node, keys[done:], pages, step)
    cache.pool.free(refused)
    return node


def cached(cache: PrefixCache, space: Namespace, word: str) -> int:
    return len(cache.match(space, keys_of(word)).pages)


def test_two_adapters_never_share_a_page() -> None:
    cache = PrefixCache(8)
    cache.unlock(remember(cache, BASE_SPACE, "ab", 1), 1)
    assert cached(cache, A_SPACE, "ab") == 0
    assert cached(cache, namespace("m", "base", "salt"), "ab") == 0
    cache.unlock(remember(cache, A_SPACE, "ab", 2), 2)
    base, other = cache.match(BASE_SPACE, keys_of("ab")), cache.match(A_SPACE, keys_of("ab"))
    assert not set(base.pages) & set(other.pages)
    cache.check([])


def test_eviction_takes_the_oldest_across_namespaces_and_suffix_before_prefix() -> None:
    cache = PrefixCache(8)
    cache.unlock(remember(cache, BASE_SPACE, "abcd", 1), 1)
    cache.unlock(remember(cache, A_SPACE, "abcd", 2), 2)
    cache.pool.free(cache.allocate(1))
    assert (cached(cache, BASE_SPACE, "abcd"), cached(cache, A_SPACE, "abcd")) == (3, 4)
    cache.pool.free(cache.allocate(5))
    assert (cached(cache, BASE_SPACE, "abcd"), cached(cache, A_SPACE, "abcd")) == (0, 3)
    assert cache.counters.evicted_pages == 5
    cache.check([])


def test_a_parent_goes_after_its_last_child_even_in_the_same_step() -> None:
    cache = PrefixCache(4)
    cache.unlock(remember(cache, BASE_SPACE, "abc", 5), 5)
    cache.unlock(remember(cache, BASE_SPACE, "abd", 5), 5)
    cache.pool.free(cache.allocate(2))
    assert cached(cache, BASE_SPACE, "ab") == 2
    assert cached(cache, BASE_SPACE, "abc") + cached(cache, BASE_SPACE, "abd") == 4
    cache.pool.free(cache.allocate(4))
    assert cached(cache, BASE_SPACE, "ab") == 0
    assert not list(cache._trees)


def test_a_locked_prefix_is_never_a_victim_and_goes_by_its_last_unlock() -> None:
    cache = PrefixCache(4)
    held = remember(cache, BASE_SPACE, "ab", 1)
    cache.unlock(remember(cache, A_SPACE, "xy", 2), 2)
    assert cache.num_available == 2
    cache.pool.free(cache.allocate(2))
    assert cached(cache, BASE_SPACE, "ab") == 2
    cache.unlock(remember(cache, A_SPACE, "xy", 3), 3)
    cache.unlock(held, 9)
    cache.pool.free(cache.allocate(2))
    assert (cached(cache, BASE_SPACE, "ab"), cached(cache, A_SPACE, "xy")) == (2, 0)


def test_probes_leave_recency_and_structure_untouched() -> None:
    cache = PrefixCache(4)
    cache.unlock(remember(cache, BASE_SPACE, "ab", 1), 1)
    cache.unlock(remember(cache, A_SPACE, "xy", 2), 2)
    for _ in range(10):
        cache.match(BASE_SPACE, keys_of("a"))
        cache.match(namespace("m", "base", "probe"), keys_of("a"))
    assert [node.num_pages for node in cache._device.order()] == [2, 2]
    cache.pool.free(cache.allocate(2))
    assert (cached(cache, BASE_SPACE, "ab"), cached(cache, A_SPACE, "xy")) == (0, 2)


def test_locking_part_of_a_node_leaves_the_rest_evictable() -> None:
    cache = PrefixCache(4)
    cache.unlock(remember(cache, BASE_SPACE, "abcd", 1), 1)
    match = cache.match(BASE_SPACE, keys_of("abx"))
    assert match.num_unlocked == 2
    node = cache.lock(match, 2)
    assert (cache.num_locked, cache.num_available) == (2, 2)
    cache.check([])
    cache.pool.free(cache.allocate(2))
    assert cached(cache, BASE_SPACE, "abcd") == 2
    cache.unlock(node, 3)
    assert cache.num_available == 4


def test_a_copy_of_what_the_tree_has_stays_with_its_owner() -> None:
    cache = PrefixCache(8)
    keys = keys_of("abc")
    first = cache.lock(cache.match(BASE_SPACE, keys), 1)
    second = cache.lock(cache.match(BASE_SPACE, keys), 1)
    first, refused = cache.insert(first, keys, cache.allocate(3), 1)
    assert refused == []
    copies = cache.allocate(3)
    second, refused = cache.insert(second, keys, copies, 1)
    assert refused == copies
    cache.check(copies)
    cache.unlock(first, 2)
    assert cache.num_locked == 3
    cache.unlock(second, 2)
    cache.pool.free(copies)
    cache.check([])


def test_a_dropped_adapter_frees_unlocked_pages_at_once_and_locked_ones_when_unlocked() -> None:
    cache = PrefixCache(8)
    held = remember(cache, A_SPACE, "ab", 1)
    cache.unlock(remember(cache, A_SPACE, "abcd", 2), 2)
    cache.unlock(remember(cache, namespace("m", "A", "salt"), "x", 2), 2)
    cache.unlock(remember(cache, BASE_SPACE, "y", 2), 2)
    assert cache.drop_adapter("A") == 3
    assert cached(cache, A_SPACE, "ab") == 0
    assert cached(cache, BASE_SPACE, "y") == 1
    cache.check(held.pages)
    again = remember(cache, A_SPACE, "ab", 3)  # the same adapter, loaded anew meanwhile
    cache.unlock(held, 4)
    cache.unlock(again, 4)
    assert cached(cache, A_SPACE, "ab") == 2
    cache.check([])
    assert cache.drop_adapter("A") == 2
    assert cache.drop_adapter("A") == 0
    assert cache.num_available == 8
    cache.check([])


def test_a_sequence_goes_on_in_a_dropped_namespace_without_leaking() -> None:
    cache = PrefixCache(8)
    node = remember(cache, A_SPACE, "ab", 1)
    cache.drop_adapter("A")
    node, refused = cache.insert(node, keys_of("cd"), cache.allocate(2), 2)
    assert refused == []
    cache.unlock(node, 3)
    assert (cache.pool.num_free, cache.num_locked, cache.num_unlocked) == (8, 0, 0)


def test_namespaces_without_pages_do_not_pile_up() -> None:
    cache = PrefixCache(4)
    for salt in range(100):
        space = namespace("m", "base", str(salt))
        cache.unlock(remember(cache, space, "ab", salt + 1), salt + 1)
        cache.unlock(cache.lock(cache.match(namespace("m", "A", str(salt)), []), 1), 1)
    assert len(list(cache._trees)) == 2
    cache.check([])


def test_no_salt_can_spell_an_adapter() -> None:
    cache = PrefixCache(8)
    cache.unlock(remember(cache, A_SPACE, "ab", 1), 1)
    for adapter, salt in [("base", "A"), ("", "A"), ("A", "A"), ("base", "baseA")]:
        assert cached(cache, namespace("m", adapter, salt), "ab") == 0
    assert cached(cache, namespace("m", "A", ""), "ab") == 2


def test_other_bytes_under_the_same_name_reach_nothing_old() -> None:
    cache = PrefixCache(8)
    cache.unlock(remember(cache, namespace("m", "digest of the old bytes", ""), "ab", 1), 1)
    assert cached(cache, namespace("m", "digest of the new bytes", ""), "ab") == 0
    assert cached(cache, namespace("m", "digest of the old bytes", ""), "ab") == 2


def test_the_same_salt_shares_and_two_salts_do_not() -> None:
    cache = PrefixCache(8)
    cache.unlock(remember(cache, namespace("m", "A", "s"), "ab", 1), 1)
    assert cached(cache, namespace("m", "A", "s"), "ab") == 2
    assert cached(cache, namespace("m", "A", "t"), "ab") == 0


def test_a_page_given_out_again_is_not_found_under_its_old_tokens() -> None:
    cache = PrefixCache(2)
    cache.unlock(remember(cache, BASE_SPACE, "ab", 1), 1)
    old = cache.match(BASE_SPACE, keys_of("ab")).pages
    cache.unlock(remember(cache, A_SPACE, "xy", 2), 2)
    assert cache.match(A_SPACE, keys_of("xy")).pages == old
    assert cached(cache, BASE_SPACE, "ab") == 0


def test_what_was_just_matched_and_locked_is_no_victim_of_its_own_admission() -> None:
    cache = PrefixCache(4)
    cache.unlock(remember(cache, BASE_SPACE, "ab", 1), 1)
    cache.unlock(remember(cache, A_SPACE, "xy", 2), 2)
    match = cache.match(BASE_SPACE, keys_of("abcd"))
    assert cache.num_available - match.num_unlocked == 2
    node = cache.lock(match, 3)
    assert cache.allocate(2) == [2, 3]
    assert (cached(cache, BASE_SPACE, "ab"), cached(cache, A_SPACE, "xy")) == (2, 0)
    cache.check([2, 3])
    cache.unlock(node, 3)


def test_an_admission_that_does_not_fit_leaves_the_order_as_it_was() -> None:
    cache = PrefixCache(4)
    cache.unlock(remember(cache, BASE_SPACE, "ab", 1), 1)
    cache.unlock(remember(cache, A_SPACE, "xy", 2), 2)
    order = [node.number for node in cache._device.order()]
    match = cache.match(BASE_SPACE, keys_of("abcdefgh"))
    assert cache.num_available - match.num_unlocked < 6
    assert [node.number for node in cache._device.order()] == order
    assert (cache.num_locked, cache.num_unlocked, cache.num_locks) == (0, 4, 0)


def test_what_is_touched_while_locked_goes_by_that_touch() -> None:
    cache = PrefixCache(4)
    cache.unlock(remember(cache, BASE_SPACE, "a", 1), 1)
    held = remember(cache, A_SPACE, "x", 2)
    cache.unlock(remember(cache, BASE_SPACE, "b", 3), 3)
    cache.unlock(remember(cache, A_SPACE, "x", 4), 4)
    cache.unlock(held, 5)
    gone = []
    for _ in range(3):
        cache.allocate(2 if not gone else 1)
        gone.append(
            "".join(
                word
                for space, word in ((BASE_SPACE, "a"), (BASE_SPACE, "b"), (A_SPACE, "x"))
                if not cached(cache, space, word)
            )
        )
    assert gone == ["a", "ab", "abx"]


def test_a_shortfall_allocates_and_evicts_nothing() -> None:
    cache = PrefixCache(4)
    held = remember(cache, BASE_SPACE, "ab", 1)
    cache.unlock(remember(cache, A_SPACE, "x", 2), 2)
    with pytest.raises(AssertionError, match="3 pages of 2 available"):
        cache.allocate(3)
    assert (cached(cache, A_SPACE, "x"), cache.pool.num_free, cache.counters.evicted_pages) == (
        1,
        1,
        0,
    )
    cache.unlock(held, 3)
    cache.check([])


def test_pages_go_below_the_lock_that_the_sequence_has_whatever_else_is_asked() -> None:
    cache = PrefixCache(8)
    node = cache.lock(cache.match(A_SPACE, keys_of("ab")), 1)
    base = remember(cache, BASE_SPACE, "ab", 1)
    node, _ = cache.insert(node, keys_of("ab"), cache.allocate(2), 1)
    assert node.tree.namespace == A_SPACE
    assert (cached(cache, A_SPACE, "ab"), cached(cache, BASE_SPACE, "ab")) == (2, 2)
    cache.unlock(node, 2)
    cache.unlock(base, 2)


def test_a_response_is_found_by_the_next_turn() -> None:
    cache = PrefixCache(8)
    node = remember(cache, BASE_SPACE, "ab", 1)
    for step, letter in enumerate("cde", start=2):
        node, _ = cache.insert(node, keys_of(letter), cache.allocate(1), step)
    cache.unlock(node, 5)
    assert cached(cache, BASE_SPACE, "abcdef") == 5
    cache.check([])


def test_the_same_calls_give_the_same_pages() -> None:
    answers = []
    for _ in range(2):
        cache = PrefixCache(6)
        for step, word in enumerate(["abc", "abd", "xy", "abc", "qrst", "abd"]):
            cache.unlock(remember(cache, BASE_SPACE, word, step // 3), step // 3)
            answers.append(cache.match(BASE_SPACE, keys_of(word)).pages)
    assert answers[:6] == answers[6:]
