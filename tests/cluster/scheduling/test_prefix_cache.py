"""All namespaces over one pool."""

from cluster.scheduling.namespace import Namespace, namespace
from cluster.scheduling.prefix_cache import PrefixCache
from cluster.scheduling.radix_tree import Node, PageKey

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
    assert cache.num_evicted == 5
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
    assert not cache._trees


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
    assert [len(node.pages) for node in cache._evictable] == [2, 2]
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
    assert sum(len(trees) for trees in cache._trees.values()) == 2
    cache.check([])
