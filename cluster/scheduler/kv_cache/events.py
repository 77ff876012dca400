"""What the prefix cache tells of its content: which pages became reachable, and which no more.

Owns the hash that names a page to the outside: it says which tokens the page holds, after which
tokens, in which namespace. Inside, the cache compares tokens, so without an observer none is made.
"""

from collections.abc import Iterable
from hashlib import blake2b
from struct import pack
from typing import Literal, Protocol

from cluster.scheduler.kv_cache.radix_tree import Namespace, Node, PageKey, RadixTree

Tier = Literal["device", "host"]

HASH_BYTES = 32


class CacheObserver(Protocol):
    """Hears of every change in the order in which it is made; replayed, it gives the content.

    A page is in one tier at a time. What moves is removed from the one, then stored in the other.
    """

    def stored(
        self,
        namespace: Namespace,
        parent: bytes,
        hashes: tuple[bytes, ...],
        keys: tuple[PageKey, ...],
        tier: Tier,
    ) -> None:
        """Hear of consecutive pages that can be found from now on.

        `parent` is the hash of the page before the first of them, or the namespace's key.
        """
        ...

    def removed(self, namespace: Namespace, hashes: tuple[bytes, ...], tier: Tier) -> None:
        """Hear of pages that cannot be found in this tier any more."""
        ...


def page_hash(parent: bytes, key: PageKey) -> bytes:
    """Return the name of a page: of its tokens after those of `parent`.

    The parent, the count of tokens and each token have fixed widths, so no two different chains
    are framed alike.
    """
    assert len(parent) == HASH_BYTES, "a parent is a hash or the key of a namespace"
    body = pack(f"<I{len(key)}I", len(key), *key)
    return blake2b(parent + body, digest_size=HASH_BYTES).digest()


class CacheEvents:
    """Tells one observer of whole nodes or of their last pages; silent without an observer."""

    def __init__(self, observer: CacheObserver | None) -> None:
        self._observer = observer

    def computed(self, node: Node) -> None:
        """Name the pages of a new node and tell of them."""
        if self._observer is None or node.tree.is_dropped:
            return
        parent = _hash_before(node, node.start)
        for key in node.run.keys:
            parent = page_hash(parent, key)
            node.run.hashes.append(parent)
        self.stored(node, node.num_pages, "device")

    def stored(self, node: Node, num_pages: int, tier: Tier) -> None:
        """Tell that the last pages of a node can be found in a tier."""
        if self._observer is not None and not node.tree.is_dropped:
            _tell(self._observer, node, num_pages, tier)

    def removed(self, node: Node, num_pages: int, tier: Tier) -> None:
        """Tell that the last pages of a node cannot be found in a tier any more."""
        if self._observer is not None and not node.tree.is_dropped:
            hashes = tuple(node.run.hashes[node.end - num_pages : node.end])
            self._observer.removed(node.tree.namespace, hashes, tier)

    def dropped(self, tree: RadixTree) -> None:
        """Tell that nothing of a tree can be found any more, whoever still holds parts of it."""
        if self._observer is None:
            return
        on_tier: dict[Tier, list[bytes]] = {"device": [], "host": []}
        for node in tree.nodes():
            on_tier[tier_of(node)] += node.run.hashes[node.start : node.end]
        for tier, hashes in on_tier.items():
            if hashes:
                self._observer.removed(tree.namespace, tuple(hashes), tier)

    def replay(self, trees: Iterable[RadixTree], observer: CacheObserver) -> None:
        """Tell a late observer of all that can be found, every page after the one before it."""
        assert self._observer is not None, "a cache that nobody observes names no pages"
        for tree in trees:
            for node in tree.nodes():
                _tell(observer, node, node.num_pages, tier_of(node))


def tier_of(node: Node) -> Tier:
    """Return where the pages of a node are."""
    return "host" if node.is_on_host else "device"


def _tell(observer: CacheObserver, node: Node, num_pages: int, tier: Tier) -> None:
    run, start = node.run, node.end - num_pages
    hashes, keys = tuple(run.hashes[start : node.end]), tuple(run.keys[start : node.end])
    observer.stored(node.tree.namespace, _hash_before(node, start), hashes, keys, tier)


def _hash_before(node: Node, at: int) -> bytes:
    """Return the name of the page before position `at` of the run of a node."""
    if at > 0:
        return node.run.hashes[at - 1]  # an earlier part of the same run is above the node
    above = node.parent
    assert above is not None, "a root has no pages"
    return above.run.hashes[above.end - 1] if above.end else node.tree.namespace.key
