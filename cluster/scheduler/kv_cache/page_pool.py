"""The KV pages of one tier, the device's or the host's: which are free, cached, or evictable.

vLLM's BlockPool, SGLang's TokenToKVPool allocator. A node of a radix tree is evictable where it is
unlocked and nothing of the same tier lies below it.
"""

from collections.abc import Iterable
from heapq import heappop, heappush

from cluster.lru import Lru
from cluster.scheduler.kv_cache.radix_tree import Node


class PagePool:
    """Page ids [0, num_pages): free here, or owned by exactly one holder elsewhere."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._num_used = 0  # pages [_num_used, num_pages) have never been given out
        self._returned: list[int] = []  # the other free ones, all smaller; a heap
        self._is_free = bytearray(b"\x01") * num_pages

    @property
    def num_free(self) -> int:
        """Pages nobody owns."""
        return len(self._returned) + self.num_pages - self._num_used

    def allocate(self, num_pages: int) -> list[int]:
        """Take the smallest free pages, so that plans do not drift; there must be enough."""
        assert num_pages <= self.num_free, f"{num_pages} pages of {self.num_free} free ones"
        num_returned = min(num_pages, len(self._returned))
        pages = [heappop(self._returned) for _ in range(num_returned)]
        end = self._num_used + num_pages - num_returned
        pages += range(self._num_used, end)
        self._num_used = end
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back."""
        for page in pages:
            assert not self._is_free[page], f"page {page} is free already"
            self._is_free[page] = 1
            heappush(self._returned, page)

    def check(self, owned: list[int]) -> None:
        """Assert that `owned`, all pages held elsewhere, and the free ones are every page once."""
        assert 0 <= self._num_used <= self.num_pages, "more pages are used than there are"
        unused = range(self._num_used, self.num_pages)
        assert sorted([*self._returned, *unused, *owned]) == list(range(self.num_pages)), (
            "free and owned pages are not every page exactly once"
        )


class PageTier:
    """The pages of one tier; all of a node's pages are in the same one."""

    def __init__(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.num_unlocked = 0  # cached pages that eviction could free now
        self.num_locked = 0  # cached pages that it could not
        self._evictable: Lru[Node] = Lru()

    @property
    def num_available(self) -> int:
        """Pages that are free or could be freed."""
        return self.pool.num_free + self.num_unlocked

    def enter(self, node: Node) -> None:
        """Count the pages of a node that is new here."""
        if node.locks:
            self.num_locked += node.num_pages
        else:
            self.num_unlocked += node.num_pages

    def leave(self, node: Node) -> None:
        """Count the pages of a node no more."""
        self.keep(node)
        if node.locks:
            self.num_locked -= node.num_pages
        else:
            self.num_unlocked -= node.num_pages

    def locked(self, node: Node) -> None:
        """Count as locked what was not."""
        self.keep(node)
        node.tree.changed()
        num_pages = node.end - node.start
        self.num_unlocked -= num_pages
        self.num_locked += num_pages

    def unlocked(self, node: Node) -> None:
        """Count as unlocked what was locked."""
        node.tree.changed()
        num_pages = node.end - node.start
        self.num_locked -= num_pages
        self.num_unlocked += num_pages

    def offer(self, node: Node) -> None:
        """Let a node of this tier go in its turn, if nothing is in the way."""
        below = node.children if node.is_on_host else node.num_device_children
        if below or node.locks or node.parent is None or node.number in self._evictable:
            return
        self._evictable.add(node.last_use, node.number, node)

    def keep(self, node: Node) -> None:
        """Do not let a node go."""
        self._evictable.discard(node.number)

    def pop(self) -> Node:
        """Take out the node that goes first; there must be one."""
        return self._evictable.pop()

    def order(self) -> list[Node]:
        """Return the evictable nodes, first the one that goes first."""
        return list(self._evictable)

    def check(self, nodes: list[Node], private_pages: list[int]) -> None:
        """Assert that every page is free, of one of `nodes` or private, and counted rightly.

        `nodes` are all reachable ones of this tier; `private_pages` are held outside the trees, or
        by locked nodes of dropped namespaces.
        """
        unlocked = [node for node in nodes if not node.locks]
        assert self.num_unlocked == sum(n.num_pages for n in unlocked), "unlocked pages miscounted"
        num_locked = sum(n.num_pages for n in nodes) - self.num_unlocked
        assert self.num_locked >= num_locked, "locked pages miscounted"
        assert self.num_locked <= num_locked + len(private_pages), "locked pages miscounted"
        ends = [
            node.number
            for node in unlocked
            if not any(child.is_on_host == node.is_on_host for child in node.children.values())
        ]
        order = self.order()
        assert sorted(ends) == sorted(n.number for n in order), "evictable is not the ends"
        ages = [(node.last_use, node.number) for node in order]
        assert ages == sorted(ages), "a use since the offer has been missed"
        self.pool.check([page for node in nodes for page in node.pages] + private_pages)
