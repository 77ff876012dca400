"""The radix trees of all namespaces that can be reached, by adapter."""

from collections.abc import Iterator
from itertools import count

from cluster.scheduler.kv_cache.namespace import Namespace
from cluster.scheduler.kv_cache.radix_tree import RadixTree


class Forest:
    """Grows trees, finds them and forgets them; numbers their nodes."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._trees: dict[str, dict[bytes, RadixTree]] = {}  # by adapter, then namespace key

    def __iter__(self) -> Iterator[RadixTree]:
        """Yield all trees."""
        for trees in self._trees.values():
            yield from trees.values()

    def get(self, namespace: Namespace) -> RadixTree | None:
        """Return the tree of a namespace if it has one."""
        return self._trees.get(namespace.adapter, {}).get(namespace.key)

    def grow(self, namespace: Namespace) -> RadixTree:
        """Return the tree of a namespace, an empty one if there was none."""
        trees = self._trees.setdefault(namespace.adapter, {})
        tree = trees.get(namespace.key)
        if tree is None:
            tree = trees[namespace.key] = RadixTree(namespace, self._numbers)
        return tree

    def cut(self, adapter: str) -> list[RadixTree]:
        """Make all trees of an adapter unreachable and return them."""
        trees = list(self._trees.pop(adapter, {}).values())
        for tree in trees:
            tree.is_dropped = True
        return trees

    def adapters(self) -> list[str]:
        """Return the adapters that have trees."""
        return list(self._trees)

    def forget_if_empty(self, tree: RadixTree) -> None:
        """Drop a tree without pages and users: salts come from clients and must not pile up."""
        if tree.root.children or tree.root.locks or tree.is_dropped:
            return
        trees = self._trees[tree.namespace.adapter]
        del trees[tree.namespace.key]
        if not trees:
            del self._trees[tree.namespace.adapter]
