"""Every namespace's pages over one page pool: match, lock, insert, evict, drop.

Owns the locks, the eviction order across all trees and the count of what could be freed. A page is
reachable in at most one tree. Only unlocked leaves are evicted, last pages first, so a suffix goes
before its prefix. Knows nothing of sequences or slots.
"""

from itertools import count

from cluster.scheduling.lru import Lru
from cluster.scheduling.namespace import Namespace
from cluster.scheduling.page_pool import PagePool
from cluster.scheduling.radix_tree import Match, Node, PageKey, RadixTree


class PrefixCache:
    """All radix trees; hands out pages and evicts to do so."""

    def __init__(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.num_unlocked = 0  # pages that eviction could free now
        self.num_locked = 0
        self.num_evicted = 0  # in the life of the cache
        self._numbers = count(1)
        self._trees: dict[str, dict[bytes, RadixTree]] = {}  # by adapter, then namespace key
        self._evictable: Lru[Node] = Lru()

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out."""
        return self.pool.num_free + self.num_unlocked

    def match(self, namespace: Namespace, keys: list[PageKey]) -> Match:
        """Return the longest cached prefix of the pages `keys`; change nothing."""
        tree = self._trees.get(namespace.adapter, {}).get(namespace.key)
        return Match(namespace, None, 0, (), 0) if tree is None else tree.match(keys)

    def lock(self, match: Match, step: int) -> Node:
        """Keep a matched prefix from eviction; return the node that `unlock` takes.

        Nothing may have been evicted since the match.
        """
        node = match.node
        if node is None:
            node = self._tree(match.namespace).root
        elif match.num_node_pages < len(node.pages):
            node = node.tree.split(node, match.num_node_pages)
        for above in node.path():
            self._lock_node(above, step)
        return node

    def unlock(self, node: Node, step: int) -> None:
        """Release one lock of `node`; in a dropped namespace, free what nobody else locks."""
        tree = node.tree
        for above in node.path():
            above.last_use = step
            above.locks -= 1
            assert above.locks >= 0, "unlocked more often than locked"
            if above.locks or above.parent is None:
                continue
            self.num_locked -= len(above.pages)
            if tree.is_dropped:
                self.pool.free(tree.trim(above, len(above.pages)))
                continue
            self.num_unlocked += len(above.pages)
            if not above.children:
                self._evictable.add(step, above.number, above)
        self._forget_if_empty(tree)

    def insert(
        self, node: Node, keys: list[PageKey], pages: list[int], step: int
    ) -> tuple[Node, list[int]]:
        """Put computed pages below `node`, whose lock the caller has.

        Returns (the node that the lock is on now, those of `pages` that the tree had already: they
        are still the caller's). All others are the cache's from here on.
        """
        end, refused = node.tree.extend(node, keys, pages)
        if len(refused) < len(pages):
            self.num_unlocked += len(end.pages)  # a new leaf; it is locked right below
        for above in end.path():
            if above is node:
                break
            self._lock_node(above, step)
        return end, refused

    def allocate(self, num_pages: int) -> list[int]:
        """Take pages out of the pool, evicting the least recently used as needed."""
        while self.pool.num_free < num_pages:
            self._evict(num_pages - self.pool.num_free)
        return self.pool.allocate(num_pages)

    def drop_adapter(self, adapter: str) -> int:
        """Make all namespaces of an adapter unreachable and return how many pages that freed.

        Locked pages are freed when they are unlocked.
        """
        freed = 0
        for tree in self._trees.pop(adapter, {}).values():
            tree.is_dropped = True
            for node in reversed(list(tree.nodes())):
                if not node.locks:
                    self._keep(node)
                    pages = tree.trim(node, len(node.pages))
                    self.num_unlocked -= len(pages)
                    freed += len(pages)
                    self.pool.free(pages)
        return freed

    def _tree(self, namespace: Namespace) -> RadixTree:
        trees = self._trees.setdefault(namespace.adapter, {})
        tree = trees.get(namespace.key)
        if tree is None:
            tree = trees[namespace.key] = RadixTree(namespace, self._numbers)
        return tree

    def _lock_node(self, node: Node, step: int) -> None:
        node.last_use = step
        node.locks += 1
        if node.locks == 1:
            self.num_unlocked -= len(node.pages)
            self.num_locked += len(node.pages)
            self._keep(node)

    def _keep(self, node: Node) -> None:
        if node.number in self._evictable:
            self._evictable.remove(node.number)

    def _evict(self, num_pages: int) -> None:
        """Free at most `num_pages` pages: the end of the leaf that goes first."""
        leaf = self._evictable.pop()
        tree, parent = leaf.tree, leaf.parent
        pages = tree.trim(leaf, min(num_pages, len(leaf.pages)))
        self.pool.free(pages)
        self.num_unlocked -= len(pages)
        self.num_evicted += len(pages)
        if leaf.pages:
            self._evictable.add(leaf.last_use, leaf.number, leaf)
        elif parent is not None and parent.parent and not parent.children and not parent.locks:
            self._evictable.add(parent.last_use, parent.number, parent)
        self._forget_if_empty(tree)

    def _forget_if_empty(self, tree: RadixTree) -> None:
        """Drop a tree without pages and users: salts come from clients and must not pile up."""
        if tree.root.children or tree.root.locks or tree.is_dropped:
            return
        trees = self._trees[tree.namespace.adapter]
        del trees[tree.namespace.key]
        if not trees:
            del self._trees[tree.namespace.adapter]

    def check(self, private_pages: list[int]) -> None:
        """Assert that every page is free, cached, locked or in `private_pages`, exactly once.

        `private_pages` are those that sequences hold outside the trees, and those of locked nodes
        in dropped namespaces.
        """
        nodes = [n for trees in self._trees.values() for t in trees.values() for n in t.nodes()]
        unlocked = [n for n in nodes if not n.locks]
        assert self.num_unlocked == sum(len(n.pages) for n in unlocked), "unlocked pages miscounted"
        leaves = sorted(n.number for n in unlocked if not n.children)
        assert leaves == sorted(n.number for n in self._evictable), "evictable is not the leaves"
        for node in nodes:
            assert node.parent is not None and node.pages, "a node without parent or pages"
            assert node.parent.children[node.keys[0]] is node, "a child under a wrong key"
            assert len(node.keys) == len(node.pages), "keys and pages differ in length"
            assert sum(c.locks for c in node.children.values()) <= node.locks, "a lock goes astray"
            assert node.locks or node.last_use <= node.parent.last_use, "prefix older than suffix"
        self.pool.check([page for n in nodes for page in n.pages] + private_pages)
