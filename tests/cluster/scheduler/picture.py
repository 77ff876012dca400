"""What the cases of the prefix cache share: an observer that keeps the picture, and short words.

The picture is what a router or an indexer would know of a cache from its events alone. An event
that contradicts the ones before it fails an assertion.
"""

from typing import Any

from cluster.scheduler.kv_cache.events import Tier, page_hash
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache.radix_tree import Namespace, Node, PageKey, namespace
from cluster.scheduler.scheduler import Scheduler
from cluster.scheduler.testing.fake_engine import FakeEngine
from tests.cluster.scheduler.conftest import tiny_config


class Picture:
    """Which pages can be found, by name, and everything that was heard."""

    def __init__(self) -> None:
        self.where: dict[bytes, tuple[Namespace, Tier]] = {}
        self.stores: list[tuple[Namespace, bytes, tuple[bytes, ...], Tier]] = []
        self.removals: list[tuple[Namespace, tuple[bytes, ...], Tier]] = []

    def stored(
        self,
        namespace: Namespace,
        parent: bytes,
        hashes: tuple[bytes, ...],
        keys: tuple[PageKey, ...],
        tier: Tier,
    ) -> None:
        assert hashes, "nothing is stored"
        is_first = parent == namespace.key
        assert is_first or self.where[parent][0] == namespace, "stored behind nothing"
        before = parent
        for name, key in zip(hashes, keys, strict=True):
            assert name == page_hash(before, key), "stored behind another page than told"
            before = name
            assert name not in self.where, "stored twice"
            self.where[name] = (namespace, tier)
        self.stores.append((namespace, parent, hashes, tier))

    def removed(self, namespace: Namespace, hashes: tuple[bytes, ...], tier: Tier) -> None:
        for name in hashes:
            assert self.where.pop(name) == (namespace, tier), "removed from where it was not"
        self.removals.append((namespace, hashes, tier))

    def names(self, adapter: str, salt: str = "") -> list[bytes]:
        """Return the names of one namespace's pages, in the order of their storing."""
        space = namespace("model", adapter, salt)
        return [name for name, (owner, _) in self.where.items() if owner == space]

    def count(self, adapter: str, tier: Tier) -> int:
        """Return how many pages of an adapter can be found in a tier."""
        return sum(
            owner.adapter == adapter and place == tier for owner, place in self.where.values()
        )


def observed(**changes: Any) -> tuple[FakeEngine, Picture]:
    """Return an engine with tiny limits and the picture of its cache."""
    config, picture = tiny_config(**changes), Picture()
    engine = FakeEngine(config)
    engine.scheduler = Scheduler(config, picture)
    return engine, picture


def keys_of(word: str) -> list[PageKey]:
    """Return a page of one token for each letter."""
    return [(ord(letter),) for letter in word]


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


def visit(cache: PrefixCache, space: Namespace, word: str, step: int) -> None:
    """Compute a word and let it go."""
    cache.unlock(remember(cache, space, word, step), step)


def forget(cache: PrefixCache, num_pages: int) -> None:
    """Make the cache give up pages until so many are free."""
    cache.pool.free(cache.allocate(num_pages))


def found(cache: PrefixCache, space: Namespace, word: str) -> int:
    """Return how many leading pages of a word are cached, in either tier."""
    return cache.match(space, keys_of(word)).num_pages
