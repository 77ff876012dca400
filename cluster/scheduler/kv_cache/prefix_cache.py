"""Every namespace's pages over one pool for each tier: match, lock, restore, insert, evict, drop.

SGLang's RadixCache, one tree for each namespace. Owns the locks. A page is reachable in at most one
tree. Only what is unlocked is evicted, last pages first, so a suffix goes before its prefix.

Where layers keep only the end of a prefix, their pages are in a pool of their own, and a match ends
at a checkpoint. A page stays reachable, and is told of, while its other layers are there. Behind
the last checkpoint of its path it serves only to find where prompts part.
"""

from cluster.errors import Conflict
from cluster.scheduler.kv_cache.checkpoint_pool import CheckpointPool, PoolSize
from cluster.scheduler.kv_cache.checkpoints import CheckpointPage
from cluster.scheduler.kv_cache.events import CacheEvents, CacheObserver
from cluster.scheduler.kv_cache.page_copies import PageCopies
from cluster.scheduler.kv_cache.page_pool import PagePool
from cluster.scheduler.kv_cache.page_tiers import PageTiers
from cluster.scheduler.kv_cache.radix_tree import Match, Namespace, Node, PageKey, RadixTrees
from cluster.scheduler.stats import CacheReset, SchedulerCounters
from worker.protocol import PageCopy


class PrefixCache:
    """All radix trees; hands out pages and evicts to do so."""

    def __init__(
        self,
        num_pages: int,
        num_host_pages: int = 0,
        observer: CacheObserver | None = None,
        counters: SchedulerCounters | None = None,
        checkpointed: PoolSize | None = None,
    ) -> None:
        self.counters = counters or SchedulerCounters()
        self._trees = RadixTrees(checkpointed is not None)
        self._events = CacheEvents(observer)
        self._copies = PageCopies()
        # Of layers that keep only the end of a prefix; None: there are none.
        self.checkpoints: CheckpointPool | None = None
        if checkpointed is not None:
            self.checkpoints = CheckpointPool(checkpointed, self._copies, self.counters)
        self._tiers = PageTiers(
            num_pages,
            num_host_pages,
            self._trees,
            self._events,
            self._copies,
            self.counters,
            self.checkpoints,
        )
        self._device = self._tiers.device
        self._host = self._tiers.host
        self.pool: PagePool = self._device.pool
        self.host_pool: PagePool = self._host.pool
        self.num_locks = 0  # that callers hold

    @property
    def num_available(self) -> int:
        """Device pages that `allocate` could hand out."""
        return self._device.num_available

    @property
    def num_unlocked(self) -> int:
        """Cached device pages that eviction could free now."""
        return self._device.num_unlocked

    @property
    def num_locked(self) -> int:
        """Cached device pages that it could not."""
        return self._device.num_locked

    @property
    def num_host_cached(self) -> int:
        """Cached host pages that eviction could free now."""
        return self._host.num_unlocked

    def version(self, namespace: Namespace) -> int:
        """Return a number that stays the same while a match in a namespace would."""
        tree = self._trees.get(namespace)
        return 0 if tree is None else tree.version

    def match(self, namespace: Namespace, keys: list[PageKey]) -> Match:
        """Return the longest cached prefix of the pages `keys`; change nothing."""
        tree = self._trees.get(namespace)
        return Match(namespace, None, 0, (), 0) if tree is None else tree.match(keys)

    def lock(self, match: Match, step: int) -> Node:
        """Keep a matched prefix from eviction; return the node that `unlock` takes.

        Nothing may have been evicted since the match.
        """
        node = match.node
        if node is None:
            node = self._trees.get_or_add(match.namespace).root
        elif match.num_node_pages < node.num_pages:
            node = node.tree.split(node, match.num_node_pages)
        self.num_locks += 1
        node.tree.changed()
        above: Node | None = node
        while above is not None:
            self._lock_node(above, step)
            above = above.parent
        return node

    def unlock(self, node: Node, step: int) -> None:
        """Release one lock of `node`; in a dropped namespace, free what nobody else locks."""
        tree = node.tree
        tree.changed()
        self.num_locks -= 1
        above: Node | None = node
        while above is not None:
            parent = above.parent
            above.last_use = step
            above.locks -= 1
            assert above.locks >= 0, "unlocked more often than locked"
            if not above.locks and parent is not None:
                tier = self._host if above.is_on_host else self._device
                tier.unlocked(above)
                if tree.is_dropped:
                    self._tiers.discard(above, above.num_pages)
                else:
                    tier.offer(above)
            above = parent
        self._trees.drop_if_empty(tree)

    def restore(self, node: Node, step: int) -> list[int]:
        """Bring the path of `node`, which the caller has just locked, wholly onto the device.

        There must be enough pages available. Returns the new device pages in path order.
        """
        pages: list[int] = []
        if not node.is_on_host:
            return pages  # then nothing above it is
        on_host = [above for above in node.path() if above.is_on_host]
        for above in reversed(on_host):
            above.last_use = step
            pages += self._tiers.restore(above)
        return pages

    def insert(
        self, node: Node, keys: list[PageKey], pages: list[int], step: int
    ) -> tuple[Node, list[int]]:
        """Put computed pages below `node`, whose lock the caller has, on the device.

        Returns (the node that the lock is on now, those of `pages` that the tree had on the device
        already: they are still the caller's). All others are the cache's from here on.
        """
        assert not node.is_on_host, "pages were computed behind a prefix that was not restored"
        end, num_known = node.tree.extend(node, keys, pages)
        grown: list[Node] = []
        above = end
        while above is not node:
            grown.append(above)
            assert above.parent is not None, "the new end is not below the old one"
            above = above.parent
        done = num_refused = 0
        for below in reversed(grown):
            start, done = done, done + below.num_pages
            if start == num_known:
                self._device.enter(below)
                self._events.computed(below)
            elif below.is_on_host:
                self._tiers.adopt(below, pages[start:done])
            else:
                num_refused = done
            self._lock_node(below, step)
        if grown:
            node.tree.changed()
        return end, pages[:num_refused]

    def keep_checkpoint(
        self, node: Node, num_pages: int, pages: list[CheckpointPage], step: int
    ) -> None:
        """Let prefixes be resumed `num_pages` pages above the end of a locked `node`.

        Args:
            node: whose lock the caller has.
            num_pages: fewer than are above.
            pages: of layers that keep only the end of a prefix, the last before the position.
            step: now.
        """
        assert self.checkpoints is not None, "no layers keep only the end of a prefix"
        if node.tree.is_dropped:
            return  # nobody would find it
        while num_pages >= node.num_pages:
            num_pages -= node.num_pages
            assert node.parent is not None, "a checkpoint before the first page"
            node = node.parent
        at = node.end - num_pages
        self.checkpoints.keep(node.tree, node.run.checkpoints, at, pages, step)

    def allocate(self, num_pages: int) -> list[int]:
        """Take device pages, evicting the least recently used as needed."""
        return self._tiers.allocate(num_pages)

    def note(self, copy: PageCopy) -> None:
        """Put a copy of the caller's behind those that the cache has noted so far."""
        self._copies.note(copy)

    def take_copies(self) -> tuple[PageCopy, ...]:
        """Return the copies noted since the last call, in the order in which to make them."""
        return self._copies.take()

    def drop_adapter(self, adapter: str) -> int:
        """Make all namespaces of an adapter unreachable; return how many device pages that freed.

        Locked pages are freed when they are unlocked. The counters tell of host pages.
        """
        num_free, num_host_free = self.pool.num_free, self.host_pool.num_free
        for tree in self._trees.drop(adapter):
            self._events.dropped(tree)
            for node in reversed(list(tree.nodes())):
                if self.checkpoints is not None:
                    self.checkpoints.cut(node.run.checkpoints, 0)
                if not node.locks:
                    self._tiers.of(node).keep(node)
                    self._tiers.discard(node, node.num_pages)
        self.counters.dropped_host_pages += self.host_pool.num_free - num_host_free
        return self.pool.num_free - num_free

    def reset(self) -> CacheReset:
        """Forget all that no lock keeps, on both tiers; return how much that was.

        What is locked can still be found.
        """
        num_free, num_host_free = self.pool.num_free, self.host_pool.num_free
        for tree in list(self._trees):
            for node in reversed(list(tree.nodes())):
                if not node.locks:
                    self._tiers.of(node).keep(node)
                    self._tiers.discard(node, node.num_pages)
            self._trees.drop_if_empty(tree)
        if self.checkpoints is not None:
            self.checkpoints.reset()
        num_freed = self.pool.num_free - num_free
        num_host_freed = self.host_pool.num_free - num_host_free
        self.counters.dropped_host_pages += num_host_freed
        return CacheReset(num_freed, num_host_freed, self.num_locked + self._host.num_locked)

    def clear(self) -> None:
        """Forget all that is cached, on both tiers.

        Raises:
            Conflict: while anybody holds a lock; nothing has changed then.
        """
        if self.num_locks:
            raise Conflict(f"{self.num_locks} running sequences hold cached pages")
        for adapter in self._trees.adapters():
            self.drop_adapter(adapter)

    def adapters(self) -> list[str]:
        """Return the adapters of which something is cached."""
        return self._trees.adapters()

    def contents(self, observer: CacheObserver) -> None:
        """Tell a late observer of all that can be found, every page after the one before it.

        The cache must have been made with an observer: only then do pages have names.
        """
        self._events.replay(self._trees, observer)

    def _lock_node(self, node: Node, step: int) -> None:
        node.last_use = step
        node.locks += 1
        if node.locks == 1 and node.parent is not None:
            (self._host if node.is_on_host else self._device).locked(node)

    def check(
        self,
        private_pages: list[int],
        private_host_pages: list[int] | None = None,
        held: list[CheckpointPage] | None = None,
    ) -> None:
        """Assert that every page of each tier is free, cached, locked or private, exactly once.

        Private are those that sequences hold outside the trees, and those of locked nodes in
        dropped namespaces. `held` are the pages that sequences hold of layers that keep only the
        end of a prefix, one entry for each hold.
        """
        nodes = [node for tree in self._trees for node in tree.nodes()]
        self._device.check([n for n in nodes if not n.is_on_host], private_pages)
        self._host.check([n for n in nodes if n.is_on_host], private_host_pages or [])
        for node in nodes:
            _check_node(node)
        runs = {id(node.run): node.run for node in nodes}
        checkpoints = [one for run in runs.values() for one in run.checkpoints]
        assert self.checkpoints is not None or not checkpoints, "a checkpoint of no pool"
        if self.checkpoints is not None:
            self.checkpoints.check(checkpoints, held or [])


def _check_node(node: Node) -> None:
    parent, children = node.parent, node.children.values()
    assert parent is not None and node.num_pages > 0, "a node without parent or pages"
    assert parent.children[node.run.keys[node.start]] is node, "a child under a wrong key"
    assert len(node.keys) == len(node.pages) == node.num_pages, "keys and pages differ in length"
    assert children or len(node.run.keys) == node.end, "a run goes on below its last node"
    positions = [one.at for one in node.run.checkpoints]
    assert positions == sorted(set(positions)), "checkpoints out of order"
    assert all(0 < at <= len(node.run.keys) for at in positions), "a checkpoint of no pages"
    assert len(node.run.hashes) in (0, len(node.run.keys)), "not one name for each page"
    assert node.start == 0 or (parent.run is node.run and parent.end == node.start), "a torn run"
    assert sum(child.locks for child in children) <= node.locks, "a lock goes astray"
    assert node.locks or node.last_use <= parent.last_use, "prefix older than suffix"
    assert node.is_on_host or not parent.is_on_host, "a page on the device behind one on the host"
    num_on_device = sum(not child.is_on_host for child in children)
    assert node.num_device_children == num_on_device, "device children miscounted"
