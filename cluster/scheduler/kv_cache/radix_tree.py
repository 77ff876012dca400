"""One namespace's cached prefixes: page-aligned token keys in, page ids out.

Owns the shape of the tree: nodes, splitting, growing and trimming. Every path spells the tokens
whose K/V its pages hold, and siblings differ in their first page. Along a path, pages on the device
come before pages in host memory. Compares real token ids, never a digest alone. The prefix cache
keeps the locks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import msgspec
from msgspec import structs

from cluster.scheduler.kv_cache.checkpoints import Checkpoint, deepest

PageKey = tuple[int, ...]  # the token ids of one full page


@dataclass(frozen=True, slots=True)
class Namespace:
    """Whose K/V it is: base model, adapter and cache salt, kept apart by a digest of the three."""

    adapter: str  # so that an unload finds all salts of it
    key: bytes


def namespace(base_digest: str, adapter: str, cache_salt: str) -> Namespace:
    """Return the namespace of a request.

    Each part goes into the digest behind its own length, so no salt can spell an adapter.
    """
    return (
        _namespace(base_digest, adapter, cache_salt)
        if cache_salt
        else _unsalted(base_digest, adapter)
    )


@lru_cache(maxsize=1024)
def _unsalted(base_digest: str, adapter: str) -> Namespace:
    return _namespace(base_digest, adapter, "")


def _namespace(base_digest: str, adapter: str, cache_salt: str) -> Namespace:
    digest = blake2b(b"topwork namespace 1", digest_size=32)
    for part in (base_digest, adapter, cache_salt):
        data = part.encode("utf-8", "surrogatepass")  # salts come from JSON: lone surrogates too
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return Namespace(adapter, digest.digest())


class Numbers:
    """Counts 1, 2, 3, ...; shared by all trees of a cache. A state of it can be written down."""

    def __init__(self) -> None:
        self.last = 0

    def take(self) -> int:
        """Return the next number."""
        self.last += 1
        return self.last


class Run:
    """Pages that came at one go. Nodes are its consecutive parts, all on one path.

    So a split copies nothing, however long the run; and as the last part goes first, a run ends
    where the last node on it does.
    """

    __slots__ = ("checkpoints", "hashes", "keys", "pages")

    def __init__(self, keys: list[PageKey], pages: list[int]) -> None:
        self.keys = keys
        self.pages = pages  # on the device or in host memory, as the node says
        self.hashes: list[bytes] = []  # of `keys`, once `CacheEvents` has made them
        self.checkpoints: list[Checkpoint] = []  # by position


class Node:
    """Pages [start, end) of a run, with one path above them. A root has no pages."""

    __slots__ = (
        "children",
        "end",
        "is_on_host",
        "last_use",
        "locks",
        "num_device_children",
        "number",
        "parent",
        "run",
        "start",
        "tree",
    )

    def __init__(
        self, tree: "RadixTree", number: int, parent: "Node | None", run: Run, start: int, end: int
    ) -> None:
        self.tree = tree
        self.number = number  # in order of creation, over all trees
        self.parent = parent
        self.run = run
        self.start = start
        self.end = end
        self.children: dict[PageKey, Node] = {}  # by their first page; never iterated to decide
        self.num_device_children = 0
        self.is_on_host = False
        self.locks = 0  # running sequences whose prefix goes through here
        self.last_use = 0  # step; never less than that of any child

    @property
    def num_pages(self) -> int:
        """Length in pages."""
        return self.end - self.start

    @property
    def keys(self) -> list[PageKey]:
        """A copy of the keys of its pages."""
        return self.run.keys[self.start : self.end]

    @property
    def pages(self) -> list[int]:
        """A copy of the ids of its pages, in the tier that `is_on_host` tells."""
        return self.run.pages[self.start : self.end]

    def path(self) -> Iterator["Node"]:
        """Yield this node and those above it, the root last."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def relocate(self, pages: list[int]) -> list[int]:
        """Change the tier: let `pages` of the other one hold the content; return the old ones."""
        assert self.parent is not None and len(pages) == self.num_pages, "not one page for each"
        old = self.pages
        self.run.pages[self.start : self.end] = pages
        self.is_on_host = not self.is_on_host
        self.tree.changed()
        self.parent.num_device_children += -1 if self.is_on_host else 1
        return old


class Match(msgspec.Struct, frozen=True):
    """A cached prefix that was found but is not held: nothing has changed by finding it."""

    namespace: Namespace
    node: Node | None  # the deepest one reached; None: the namespace has no tree
    num_node_pages: int  # leading pages of `node` that matched
    pages: tuple[int, ...]  # on the device
    num_unlocked: int  # those of `pages` that could still be evicted
    num_host_pages: int = 0  # that follow `pages`, in host memory
    # Where layers keep only the end of a prefix: what a sequence resumes at, and the pages that
    # were found behind it, of which the other layers have the K and V.
    checkpoint: Checkpoint | None = None
    num_passed: int = 0

    @property
    def num_pages(self) -> int:
        """Pages found, wherever they lie."""
        return len(self.pages) + self.num_host_pages


def _common(node: Node, keys: list[PageKey], at: int) -> int:
    """Return how many leading pages of `node` equal keys[at:]; the first one does."""
    known, start = node.run.keys, node.start
    end = min(node.end - start, len(keys) - at)
    if known[start : start + end] == keys[at : at + end]:
        return end
    return next(i for i in range(1, end) if known[start + i] != keys[at + i])


def _last_checkpoint(match: Match) -> tuple[Checkpoint | None, int]:
    """Return the last checkpoint of a prefix and how many pages are before it."""
    node, position = match.node, match.num_pages
    assert node is not None, "a prefix that was found has a node"
    end = node.start + match.num_node_pages
    while node.parent is not None:
        checkpoint = deepest(node.run.checkpoints, node.start, end)
        if checkpoint is not None:
            return checkpoint, position - (end - checkpoint.at)
        position -= end - node.start
        node = node.parent
        end = node.end
    return None, 0


class RadixTree:
    """The pages of one namespace."""

    def __init__(
        self, namespace: Namespace, numbers: Numbers, has_checkpoints: bool = False
    ) -> None:
        self.namespace = namespace
        self.has_checkpoints = has_checkpoints  # prefixes end at one
        self.is_dropped = False  # no request can reach it any more; what is locked still stands
        self._numbers = numbers
        self.version = 0  # another one whenever a match might have another result
        self.root = Node(self, numbers.take(), None, Run([], []), 0, 0)
        self.changed()

    def changed(self) -> None:
        """Make all earlier matches stale; no two versions of any trees of a cache are equal."""
        self.version = self._numbers.take()

    def match(self, keys: list[PageKey]) -> Match:
        """Return the longest cached prefix of `keys`; a probe that leaves no trace."""
        found = self._longest(keys)
        if not self.has_checkpoints or not found.num_pages:
            return found
        checkpoint, num_pages = _last_checkpoint(found)
        cut = found if num_pages == found.num_pages else self._longest(keys[:num_pages])
        num_passed = found.num_pages - num_pages
        return structs.replace(cut, checkpoint=checkpoint, num_passed=num_passed)

    def _longest(self, keys: list[PageKey]) -> Match:
        node, num_node_pages, num_matched, num_unlocked = self.root, 0, 0, 0
        pages: list[int] = []
        while num_matched < len(keys) and num_node_pages == node.end - node.start:
            child = node.children.get(keys[num_matched])
            if child is None:
                break
            node, num_node_pages = child, _common(child, keys, num_matched)
            num_matched += num_node_pages
            if not node.is_on_host:
                pages += node.run.pages[node.start : node.start + num_node_pages]
                num_unlocked += 0 if node.locks else num_node_pages
        return Match(
            self.namespace,
            node,
            num_node_pages,
            tuple(pages),
            num_unlocked,
            num_matched - len(pages),
        )

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut `node` so that its first `num_pages` pages are a node of their own; return that.

        The lower part stays the same object, so whoever holds it still holds the same prefix.
        """
        assert node.parent is not None and 0 < num_pages < node.num_pages, "nothing to split"
        cut = node.start + num_pages
        self.changed()
        upper = Node(self, self._numbers.take(), node.parent, node.run, node.start, cut)
        upper.is_on_host, upper.locks, upper.last_use = node.is_on_host, node.locks, node.last_use
        upper.num_device_children = 0 if node.is_on_host else 1
        upper.children[node.run.keys[cut]] = node
        node.parent.children[node.run.keys[node.start]] = upper
        node.parent, node.start = upper, cut
        return upper

    def extend(self, node: Node, keys: list[PageKey], pages: list[int]) -> tuple[Node, int]:
        """Grow the path of `node` by `keys`; return (its new end, how many the tree knew already).

        Of those it keeps its own pages; from the first one that it lacks, all of `pages` are taken.
        """
        done = 0
        while done < len(keys):
            child = node.children.get(keys[done])
            if child is None:
                run = Run(keys[done:], pages[done:])
                self.changed()
                leaf = Node(self, self._numbers.take(), node, run, 0, len(run.keys))
                node.children[keys[done]] = leaf
                node.num_device_children += 1
                return leaf, done
            num_common = _common(child, keys, done)
            node = child if num_common == child.num_pages else self.split(child, num_common)
            done += num_common
        return node, done

    def trim(self, leaf: Node, num_pages: int) -> list[int]:
        """Cut the last `num_pages` pages off a leaf and return them; an empty leaf goes."""
        run, parent, keep = leaf.run, leaf.parent, leaf.end - num_pages
        assert parent is not None and not leaf.children, "only a leaf can be trimmed"
        self.changed()
        if keep == leaf.start:
            del parent.children[run.keys[keep]]
            parent.num_device_children -= 0 if leaf.is_on_host else 1
        pages = run.pages[keep:]
        del run.keys[keep:], run.pages[keep:], run.hashes[keep:]
        leaf.end = keep
        return pages

    def sink(self, node: Node, pages: list[int]) -> tuple[Node, list[int]]:
        """Let the host pages `pages` hold the content of the last pages of a device node.

        Returns (the host node that they are in, the device pages that held it). What stays on the
        device, if anything does, is the parent of that node and takes the place of `node` in the
        order of eviction. Where the node below is the next part of the same run, the pages join
        it, so that runs which sink page by page do not end as chains of short nodes.
        """
        self.changed()
        cut = node.end - len(pages)
        below = self._next_part(node)
        if below is None:
            if cut > node.start:
                upper = self.split(node, cut - node.start)
                upper.number, node.number = node.number, upper.number
            return node, node.relocate(pages)
        run, parent = node.run, node.parent
        assert parent is not None, "a root has no pages"
        old, run.pages[cut : node.end] = run.pages[cut : node.end], pages
        below.start = node.end = cut
        node.children = {run.keys[cut]: below}
        if cut == node.start:
            below.parent = parent
            parent.children[run.keys[cut]] = below
            parent.num_device_children -= 1
        return below, old

    def _next_part(self, node: Node) -> Node | None:
        """Return the only child if it is the next part of the same run and as old."""
        if len(node.children) != 1 or len(node.run.keys) == node.end:
            return None
        child = node.children.get(node.run.keys[node.end])
        if child is None or child.run is not node.run or child.last_use != node.last_use:
            return None
        return child

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the root, parents before children."""
        stack = [self.root]
        while stack:
            children = list(stack.pop().children.values())
            yield from children
            stack += children


class RadixTrees:
    """The trees of all namespaces that can be reached, by adapter."""

    def __init__(self, has_checkpoints: bool = False) -> None:
        self._numbers = Numbers()
        self._has_checkpoints = has_checkpoints
        self._trees: dict[str, dict[bytes, RadixTree]] = {}  # by adapter, then namespace key

    def __iter__(self) -> Iterator[RadixTree]:
        """Yield all trees."""
        for trees in self._trees.values():
            yield from trees.values()

    def get(self, namespace: Namespace) -> RadixTree | None:
        """Return the tree of a namespace if it has one."""
        return self._trees.get(namespace.adapter, {}).get(namespace.key)

    def get_or_add(self, namespace: Namespace) -> RadixTree:
        """Return the tree of a namespace, an empty one if there was none."""
        trees = self._trees.setdefault(namespace.adapter, {})
        tree = trees.get(namespace.key)
        if tree is None:
            tree = trees[namespace.key] = RadixTree(namespace, self._numbers, self._has_checkpoints)
        return tree

    def drop(self, adapter: str) -> list[RadixTree]:
        """Make all trees of an adapter unreachable and return them."""
        trees = list(self._trees.pop(adapter, {}).values())
        for tree in trees:
            tree.is_dropped = True
        return trees

    def adapters(self) -> list[str]:
        """Return the adapters that have trees."""
        return list(self._trees)

    def drop_if_empty(self, tree: RadixTree) -> None:
        """Drop a tree without pages and users: salts come from clients and must not pile up."""
        if tree.root.children or tree.root.locks or tree.is_dropped:
            return
        trees = self._trees[tree.namespace.adapter]
        del trees[tree.namespace.key]
        if not trees:
            del self._trees[tree.namespace.adapter]
