"""What an observer hears."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduler.kv_cache.events import Tier, page_hash
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache.radix_tree import Namespace, Node, PageKey, namespace

BASE_SPACE = namespace("m", "base", "")
A_SPACE = namespace("m", "A", "")

Call = tuple[str, Namespace, tuple[bytes, ...], Tier]


class Listener:
    """An observer that writes down what it hears."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.parents: list[bytes] = []
        self.keys: list[tuple[PageKey, ...]] = []

    def stored(
        self,
        namespace: Namespace,
        parent: bytes,
        hashes: tuple[bytes, ...],
        keys: tuple[PageKey, ...],
        tier: Tier,
    ) -> None:
        self.calls.append(("stored", namespace, hashes, tier))
        self.parents.append(parent)
        self.keys.append(keys)

    def removed(self, namespace: Namespace, hashes: tuple[bytes, ...], tier: Tier) -> None:
        self.calls.append(("removed", namespace, hashes, tier))

    def take(self) -> list[Call]:
        calls, self.calls = self.calls, []
        return calls


def keys_of(word: str) -> list[PageKey]:
    return [(ord(letter),) for letter in word]


def hashes_of(space: Namespace, word: str) -> list[bytes]:
    chain = [space.key]
    for key in keys_of(word):
        chain.append(page_hash(chain[-1], key))
    return chain[1:]


def remember(cache: PrefixCache, space: Namespace, word: str, step: int) -> Node:
    keys = keys_of(word)
    match = cache.match(space, keys)
    node = cache.lock(match, step)
    cache.restore(node, step)
    pages = cache.allocate(len(keys) - match.num_pages)
    node, refused = cache.insert(node, keys[match.num_pages :], pages, step)
    cache.pool.free(refused)
    return node


def test_every_page_is_named_after_the_one_before_it_in_its_own_namespace() -> None:
    listener = Listener()
    cache = PrefixCache(8, 0, listener)
    node = remember(cache, A_SPACE, "ab", 1)
    node, _ = cache.insert(node, keys_of("cd"), cache.allocate(2), 2)
    first, second, third, fourth = hashes_of(A_SPACE, "abcd")
    assert listener.take() == [
        ("stored", A_SPACE, (first, second), "device"),
        ("stored", A_SPACE, (third, fourth), "device"),
    ]
    assert listener.parents == [A_SPACE.key, second]
    assert listener.keys == [tuple(keys_of("ab")), tuple(keys_of("cd"))]
    cache.unlock(node, 3)
    assert listener.take() == []


def test_two_adapters_share_no_name_at_any_depth() -> None:
    spaces = [BASE_SPACE, A_SPACE, namespace("m", "base", "A"), namespace("n", "base", "")]
    names = [name for space in spaces for name in hashes_of(space, "aaaa")]
    assert len(set(names)) == len(names)


def test_a_name_depends_on_nothing_but_namespace_and_tokens() -> None:
    heard = []
    for chunks in (["abcd"], ["a", "b", "c", "d"], ["abx", "ab", "cd"]):
        listener = Listener()
        cache = PrefixCache(8, 0, listener)
        cache.unlock(remember(cache, BASE_SPACE, chunks[0], 1), 1)
        node = remember(cache, BASE_SPACE, "ab" if chunks[0] == "abx" else chunks[0], 1)
        for chunk in chunks[2 if chunks[0] == "abx" else 1 :]:
            node, _ = cache.insert(node, keys_of(chunk), cache.allocate(len(chunk)), 1)
        heard.append({name for call in listener.take() for name in call[2]})
    assert heard[0] == heard[1] == set(hashes_of(BASE_SPACE, "abcd"))
    assert heard[2] == heard[0] | set(hashes_of(BASE_SPACE, "abx"))


@given(st.lists(st.lists(st.integers(0, 300), max_size=4).map(tuple), max_size=4))
def test_no_two_ways_to_cut_tokens_into_pages_spell_the_same_name(keys: list[PageKey]) -> None:
    tokens = [token for key in keys for token in key]
    one_page = page_hash(bytes(32), tuple(tokens))
    chain = [bytes(32)]
    for key in keys:
        chain.append(page_hash(chain[-1], key))
    assert len(set(chain)) == len(chain)
    assert (chain[-1] == one_page) == (len(keys) == 1)


def test_a_parent_that_is_no_hash_is_refused() -> None:
    with pytest.raises(AssertionError, match="a parent is"):
        page_hash(b"short", (1, 2))


def test_what_is_evicted_is_removed_from_the_end() -> None:
    listener = Listener()
    cache = PrefixCache(4, 0, listener)
    cache.unlock(remember(cache, BASE_SPACE, "abcd", 1), 1)
    listener.take()
    cache.allocate(3)
    names = hashes_of(BASE_SPACE, "abcd")
    assert listener.take() == [("removed", BASE_SPACE, tuple(names[1:]), "device")]


def test_what_grows_again_from_nothing_begins_at_the_namespace() -> None:
    listener = Listener()
    cache = PrefixCache(2, 0, listener)
    cache.unlock(remember(cache, A_SPACE, "ab", 1), 1)
    cache.pool.free(cache.allocate(1))
    cache.unlock(remember(cache, A_SPACE, "ac", 2), 2)
    cache.pool.free(cache.allocate(2))
    cache.unlock(remember(cache, A_SPACE, "b", 3), 3)
    a, b = hashes_of(A_SPACE, "ab")
    assert listener.parents == [A_SPACE.key, a, A_SPACE.key]
    assert [call[2] for call in listener.take() if call[0] == "stored"] == [
        (a, b),
        (hashes_of(A_SPACE, "ac")[1],),
        (hashes_of(A_SPACE, "b")[0],),
    ]


def test_what_is_saved_changes_its_tier_and_what_comes_back_does_so_too() -> None:
    listener = Listener()
    cache = PrefixCache(4, 4, listener)
    cache.unlock(remember(cache, A_SPACE, "abc", 1), 1)
    listener.take()
    cache.pool.free(cache.allocate(3))
    a, b, c = hashes_of(A_SPACE, "abc")
    assert listener.take() == [
        ("removed", A_SPACE, (b, c), "device"),
        ("stored", A_SPACE, (b, c), "host"),
    ]
    assert listener.parents[-1] == a
    cache.unlock(remember(cache, A_SPACE, "ab", 2), 2)
    assert listener.take() == [
        ("removed", A_SPACE, (b,), "host"),
        ("stored", A_SPACE, (b,), "device"),
    ]
    assert listener.parents[-1] == a


def test_a_saved_page_that_is_computed_again_is_told_like_one_that_comes_back() -> None:
    listener = Listener()
    cache = PrefixCache(4, 4, listener)
    first = cache.lock(cache.match(A_SPACE, keys_of("a")), 1)
    copy = cache.allocate(1)
    cache.unlock(remember(cache, A_SPACE, "a", 1), 1)
    cache.pool.free(cache.allocate(3))
    listener.take()
    cache.insert(first, keys_of("a"), copy, 2)
    (a,) = hashes_of(A_SPACE, "a")
    assert listener.take() == [
        ("removed", A_SPACE, (a,), "host"),
        ("stored", A_SPACE, (a,), "device"),
    ]


def test_what_the_host_drops_is_removed_there() -> None:
    listener = Listener()
    cache = PrefixCache(1, 1, listener)
    cache.unlock(remember(cache, BASE_SPACE, "a", 1), 1)
    cache.unlock(remember(cache, A_SPACE, "a", 2), 2)
    listener.take()
    cache.allocate(1)
    (base,), (other,) = hashes_of(BASE_SPACE, "a"), hashes_of(A_SPACE, "a")
    assert listener.take() == [
        ("removed", BASE_SPACE, (base,), "host"),
        ("removed", A_SPACE, (other,), "device"),
        ("stored", A_SPACE, (other,), "host"),
    ]


def test_a_dropped_namespace_is_removed_at_once_also_where_it_is_locked() -> None:
    listener = Listener()
    cache = PrefixCache(4, 4, listener)
    cache.unlock(remember(cache, A_SPACE, "abc", 1), 1)
    held = remember(cache, A_SPACE, "ab", 2)
    cache.unlock(remember(cache, namespace("m", "A", "salt"), "x", 2), 2)
    cache.pool.free(cache.allocate(1))
    listener.take()
    a, b, c = hashes_of(A_SPACE, "abc")
    (x,) = hashes_of(namespace("m", "A", "salt"), "x")
    assert cache.drop_adapter("A") == 1
    assert listener.take() == [
        ("removed", A_SPACE, (a, b), "device"),
        ("removed", A_SPACE, (c,), "host"),
        ("removed", namespace("m", "A", "salt"), (x,), "device"),
    ]
    held, _ = cache.insert(held, keys_of("y"), cache.allocate(1), 3)  # it runs on, unheard
    again = remember(cache, A_SPACE, "a", 3)
    assert listener.take() == [("stored", A_SPACE, (a,), "device")]
    cache.unlock(held, 4)
    assert listener.take() == []
    cache.unlock(again, 4)
    assert cache.drop_adapter("A") == 1
    assert listener.take() == [("removed", A_SPACE, (a,), "device")]
    assert cache.drop_adapter("A") == 0
    assert listener.take() == []


def test_a_cache_that_is_cleared_says_so_of_every_page() -> None:
    listener = Listener()
    cache = PrefixCache(2, 2, listener)
    cache.unlock(remember(cache, BASE_SPACE, "ab", 1), 1)
    cache.unlock(remember(cache, A_SPACE, "a", 2), 2)
    listener.take()
    cache.clear()
    a, b = hashes_of(BASE_SPACE, "ab")
    assert listener.take() == [
        ("removed", BASE_SPACE, (a,), "device"),
        ("removed", BASE_SPACE, (b,), "host"),
        ("removed", A_SPACE, tuple(hashes_of(A_SPACE, "a")), "device"),
    ]


def test_a_late_observer_hears_all_that_is_there_parents_first() -> None:
    cache = PrefixCache(4, 4, Listener())
    cache.unlock(remember(cache, BASE_SPACE, "abcd", 1), 1)
    cache.unlock(remember(cache, BASE_SPACE, "abx", 2), 2)
    cache.unlock(remember(cache, A_SPACE, "ab", 3), 3)
    late = Listener()
    cache.contents(late)
    for space in (BASE_SPACE, A_SPACE):
        named = {space.key}
        told = zip(late.calls, late.parents, late.keys, strict=True)
        for (_, _, names, _), parent, keys in [t for t in told if t[0][1] == space]:
            assert parent in named
            for (before, name), key in zip(pairwise((parent, *names)), keys, strict=True):
                assert name == page_hash(before, key)
            named.update(names)
        words = ("abcd", "abx") if space is BASE_SPACE else ("ab",)
        found = set()
        for word in words:
            match = cache.match(space, keys_of(word))
            found |= set(hashes_of(space, word)[: match.num_pages])
        assert named - {space.key} == found


def test_without_an_observer_no_page_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> bytes:
        raise AssertionError("a page was named")

    monkeypatch.setattr("cluster.scheduler.kv_cache.events.page_hash", fail)
    cache = PrefixCache(2, 2)
    cache.unlock(remember(cache, BASE_SPACE, "ab", 1), 1)
    cache.unlock(remember(cache, A_SPACE, "ab", 2), 2)
    cache.unlock(remember(cache, BASE_SPACE, "ab", 3), 3)
    cache.clear()
    with pytest.raises(AssertionError, match="nobody observes"):
        cache.contents(Listener())


def test_probes_locks_and_splits_are_not_heard() -> None:
    listener = Listener()
    cache = PrefixCache(4, 4, listener)
    cache.unlock(remember(cache, BASE_SPACE, "abcd", 1), 1)
    listener.take()
    cache.match(BASE_SPACE, keys_of("abx"))
    cache.unlock(cache.lock(cache.match(BASE_SPACE, keys_of("abx")), 2), 2)
    cache.check([])
    assert listener.take() == []
