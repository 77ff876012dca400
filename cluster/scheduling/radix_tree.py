"""One namespace's cached prefixes: page-aligned token keys in, page ids out.

Owns the shape of the tree: nodes, splitting, growing and trimming. Every path spells the tokens
whose K/V its pages hold, and siblings differ in their first page. Compares real token ids, never a
digest alone. Knows neither free pages nor eviction order; `prefix_cache` keeps the locks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.scheduling.namespace import Namespace

PageKey = tuple[int, ...]  # the token ids of one full page


class Node:
    """A run of pages with one path above it. A root has no pages."""

    __slots__ = ("children", "keys", "last_use", "locks", "number", "pages", "parent", "tree")

    def __init__(
        self,
        tree: "RadixTree",
        number: int,
        parent: "Node | None",
        keys: list[PageKey],
        pages: list[int],
    ) -> None:
        self.tree = tree
        self.number = number  # in order of creation, over all trees
        self.parent = parent
        self.keys = keys
        self.pages = pages
        self.children: dict[PageKey, Node] = {}  # by their first page; never iterated to decide
        self.locks = 0  # running sequences whose prefix goes through here
        self.last_use = 0  # step; never less than that of any child

    def path(self) -> Iterator["Node"]:
        """Yield this node and those above it, the root last."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix that was found but is not held: nothing has changed by finding it."""

    namespace: Namespace
    node: Node | None  # the deepest one reached; None: the namespace has no tree
    num_node_pages: int  # leading pages of `node` that matched
    pages: tuple[int, ...]
    num_unlocked: int  # those of `pages` that could still be evicted


def _common(node: Node, keys: list[PageKey], start: int) -> int:
    """Return how many leading pages of `node` equal keys[start:]; the first one does."""
    end = min(len(node.keys), len(keys) - start)
    if node.keys[:end] == keys[start : start + end]:
        return end
    return next(i for i in range(1, end) if node.keys[i] != keys[start + i])


class RadixTree:
    """The pages of one namespace."""

    def __init__(self, namespace: Namespace, numbers: Iterator[int]) -> None:
        self.namespace = namespace
        self.is_dropped = False  # no request can reach it any more; what is locked still stands
        self._numbers = numbers
        self.root = Node(self, next(numbers), None, [], [])

    def match(self, keys: list[PageKey]) -> Match:
        """Return the longest cached prefix of `keys`; a probe that leaves no trace."""
        node, num_node_pages, num_unlocked = self.root, 0, 0
        pages: list[int] = []
        while len(pages) < len(keys) and num_node_pages == len(node.pages):
            child = node.children.get(keys[len(pages)])
            if child is None:
                break
            node, num_node_pages = child, _common(child, keys, len(pages))
            pages += node.pages[:num_node_pages]
            num_unlocked += 0 if node.locks else num_node_pages
        return Match(self.namespace, node, num_node_pages, tuple(pages), num_unlocked)

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut `node` so that its first `num_pages` pages are a node of their own; return that.

        The lower part stays the same object, so whoever holds it still holds the same prefix.
        """
        assert node.parent is not None and 0 < num_pages < len(node.pages), "nothing to split"
        upper = Node(
            self, next(self._numbers), node.parent, node.keys[:num_pages], node.pages[:num_pages]
        )
        upper.locks, upper.last_use = node.locks, node.last_use
        node.parent.children[upper.keys[0]] = upper
        del node.keys[:num_pages], node.pages[:num_pages]
        node.parent = upper
        upper.children[node.keys[0]] = node
        return upper

    def extend(self, node: Node, keys: list[PageKey], pages: list[int]) -> tuple[Node, list[int]]:
        """Grow the path of `node` by `keys`; return (its new end, those `pages` that it refused).

        Where the tree has a page already it keeps its own. Every page from the first one that it
        lacks is taken over.
        """
        done = 0
        while done < len(keys):
            child = node.children.get(keys[done])
            if child is None:
                leaf = Node(self, next(self._numbers), node, keys[done:], pages[done:])
                node.children[keys[done]] = leaf
                return leaf, pages[:done]
            num_common = _common(child, keys, done)
            node = child if num_common == len(child.pages) else self.split(child, num_common)
            done += num_common
        return node, pages

    def trim(self, leaf: Node, num_pages: int) -> list[int]:
        """Cut the last `num_pages` pages off a leaf and return them; an empty leaf goes."""
        assert leaf.parent is not None and not leaf.children, "only a leaf can be trimmed"
        first, keep = leaf.keys[0], len(leaf.pages) - num_pages
        pages = leaf.pages[keep:]
        del leaf.keys[keep:], leaf.pages[keep:]
        if not leaf.pages:
            del leaf.parent.children[first]
        return pages

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the root, parents before children."""
        stack = [self.root]
        while stack:
            children = list(stack.pop().children.values())
            yield from children
            stack += children
