"""The KV pages of both tiers, device and host: free, cached, evictable; eviction and offload.

vLLM's BlockPool and its KV offloading, SGLang's host pool. A node of a radix tree is evictable
where it is unlocked and nothing of the same tier lies below it. When a page is needed, the end of
the least recently used node on the device is saved to the host, and the least recently used pages
there are dropped for it; where the host has no room, or there is no host tier, the page is dropped.
With a page its checkpoints go.
"""

from cluster.lru import Lru
from cluster.scheduler.kv_cache.checkpoint_pool import CheckpointPool
from cluster.scheduler.kv_cache.events import CacheEvents, tier_of
from cluster.scheduler.kv_cache.page_copies import PageCopies
from cluster.scheduler.kv_cache.page_pool import PagePool
from cluster.scheduler.kv_cache.radix_tree import Node, RadixTrees
from cluster.scheduler.stats import SchedulerCounters
from worker.protocol import PageCopy


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
        num_pages = node.end - node.start
        self.num_unlocked -= num_pages
        self.num_locked += num_pages

    def unlocked(self, node: Node) -> None:
        """Count as unlocked what was locked."""
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


class PageTiers:
    """Both tiers; a cached page is in one of them."""

    def __init__(
        self,
        num_pages: int,
        num_host_pages: int,
        trees: RadixTrees,
        events: CacheEvents,
        copies: PageCopies,
        counters: SchedulerCounters,
        checkpoints: CheckpointPool | None,
    ) -> None:
        self.device = PageTier(num_pages)
        self.host = PageTier(num_host_pages)
        self._copies = copies
        self._checkpoints = checkpoints
        self._trees = trees
        self._events = events
        self._counters = counters

    def of(self, node: Node) -> PageTier:
        """Return the tier that the pages of a node are in."""
        return self.host if node.is_on_host else self.device

    def allocate(self, num_pages: int) -> list[int]:
        """Take device pages, evicting the least recently used as needed."""
        pool, num_available = self.device.pool, self.device.num_available
        assert num_pages <= num_available, f"{num_pages} pages of {num_available} available ones"
        while pool.num_free < num_pages:
            self._evict(num_pages - pool.num_free)
        return pool.allocate(num_pages)

    def restore(self, node: Node) -> list[int]:
        """Bring a locked host node to the device, where its parent is; return its pages there."""
        pages = self.allocate(node.num_pages)
        host_pages = self.adopt(node, pages)
        for key, host_page, page in zip(node.keys, host_pages, pages, strict=True):
            self._copies.note(PageCopy("restore", host_page, page, len(key)))
        self._counters.restored_pages += len(pages)
        return pages

    def adopt(self, node: Node, pages: list[int]) -> list[int]:
        """Let device pages with the same content take the place of a node's host pages.

        Returns those, which are free from here on.
        """
        self._events.removed(node, node.num_pages, "host")
        self.host.leave(node)
        host_pages = node.relocate(pages)
        self.host.pool.free(host_pages)
        self.device.enter(node)
        self._events.stored(node, node.num_pages, "device")
        return host_pages

    def discard(self, node: Node, num_pages: int) -> None:
        """Free the last pages of an unlocked node with nothing below it, for good."""
        tier = self.of(node)
        self._events.removed(node, num_pages, tier_of(node))
        tier.num_unlocked -= num_pages
        tier.pool.free(node.tree.trim(node, num_pages))
        if self._checkpoints is not None:
            self._checkpoints.cut(node.run.checkpoints, node.end)

    def _evict(self, num_pages: int) -> None:
        """Free at most `num_pages` device pages: the end of the node that goes first."""
        node = self.device.pop()
        tree, parent = node.tree, node.parent
        assert parent is not None, "a root is never evictable"
        num_freed = min(num_pages, node.num_pages)
        num_saved = min(num_freed, self.host.num_available)
        self._make_host_room(num_saved)
        if num_saved < num_freed:
            # The host keeps nothing that is unlocked, so nothing is left below the node.
            self.discard(node, num_freed - num_saved)
        if num_saved:
            parent = self._save(node, num_saved)
        self._counters.evicted_pages += num_freed
        is_left = node.num_pages and not node.is_on_host
        self.device.offer(node if is_left else parent)
        self._trees.drop_if_empty(tree)

    def _save(self, node: Node, num_pages: int) -> Node:
        """Move the last pages of a device node to the host; return the node above them."""
        self._events.removed(node, num_pages, "device")
        self._events.stored(node, num_pages, "host")
        keys = node.run.keys[node.end - num_pages : node.end]
        host_pages = self.host.pool.allocate(num_pages)
        saved, pages = node.tree.sink(node, host_pages)
        for key, page, host_page in zip(keys, pages, host_pages, strict=True):
            self._copies.note(PageCopy("save", page, host_page, len(key)))
        self.device.num_unlocked -= num_pages
        self.device.pool.free(pages)
        self.host.num_unlocked += num_pages
        self.host.offer(saved)
        self._counters.saved_pages += num_pages
        assert saved.parent is not None, "a root is on no host"
        return saved.parent

    def _make_host_room(self, num_pages: int) -> None:
        """Drop what goes first on the host until so many pages are free there."""
        pool = self.host.pool
        while pool.num_free < num_pages:
            node = self.host.pop()
            tree, parent = node.tree, node.parent
            assert parent is not None, "a root is on no host"
            num_dropped = min(num_pages - pool.num_free, node.num_pages)
            self.discard(node, num_dropped)
            self._counters.evicted_host_pages += num_dropped
            if node.num_pages:
                self.host.offer(node)
            elif parent.is_on_host:
                self.host.offer(parent)
            self._trees.drop_if_empty(tree)
