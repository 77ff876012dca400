"""The prefix cache as one frozen message, and back: trees, nodes and counters.

Counts, locks, free pages and the order of eviction follow from what is kept here, so they are not
kept. Ages are told as ranks: only their order decides anything. Reads and writes the private state
of the cache's rooms; owns no state itself. Names of pages for an observer do not survive.
"""

from collections.abc import Iterable

import msgspec

from cluster.scheduler.kv_cache.namespace import Namespace
from cluster.scheduler.kv_cache.page_pool import PagePool
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache.radix_tree import Node, Run
from worker.protocol import PageCopy


class TreeState(msgspec.Struct, frozen=True, array_like=True):
    """One namespace."""

    adapter: str
    key: bytes


class NodeState(msgspec.Struct, frozen=True, array_like=True):
    """One node of a tree; parents come before their children, siblings in their order."""

    tree: int  # index
    parent: int | None  # index among all nodes; None: the root of its tree
    age: int  # rank of its number among all nodes
    last_use: int
    is_on_host: bool
    continues: bool  # begins where the parent ends in the parent's own run
    tokens: tuple[int, ...]  # of all its pages
    pages: tuple[int, ...]


class CacheState(msgspec.Struct, frozen=True, array_like=True):
    """Both tiers."""

    trees: tuple[TreeState, ...]
    nodes: tuple[NodeState, ...]
    copies: tuple[PageCopy, ...]  # that no plan has told yet
    num_host_dropped: int
    num_evicted: int
    num_saved: int
    num_restored: int
    num_host_evicted: int


def snapshot_cache(cache: PrefixCache) -> tuple[CacheState, dict[Node, int]]:
    """Return the state and the index of each node in it."""
    tiers, trees = cache._tiers, list(cache._forest)
    nodes: list[Node] = []
    tree_of: list[int] = []
    for index, tree in enumerate(trees):
        found = [tree.root, *tree.nodes()]
        nodes += found
        tree_of += [index] * len(found)
    index_by_node = {node: index for index, node in enumerate(nodes)}
    ages = {node: age for age, node in enumerate(sorted(nodes, key=lambda node: node.number))}
    state = CacheState(
        trees=tuple(TreeState(t.namespace.adapter, t.namespace.key) for t in trees),
        nodes=tuple(
            NodeState(
                tree=tree_index,
                parent=None if node.parent is None else index_by_node[node.parent],
                age=ages[node],
                last_use=node.last_use,
                is_on_host=node.is_on_host,
                continues=node.start > 0,
                tokens=tuple(token for key in node.keys for token in key),
                pages=tuple(node.pages),
            )
            for node, tree_index in zip(nodes, tree_of, strict=True)
        ),
        copies=tuple(tiers._copies),
        num_host_dropped=cache.num_host_dropped,
        num_evicted=tiers.num_evicted,
        num_saved=tiers.num_saved,
        num_restored=tiers.num_restored,
        num_host_evicted=tiers.num_host_evicted,
    )
    return state, index_by_node


def restore_cache(cache: PrefixCache, state: CacheState, page_size: int) -> list[Node]:
    """Grow the trees of a state in an empty cache and return the nodes by index.

    `finish_cache` must follow, once the nodes have their locks.
    """
    forest, tiers = cache._forest, cache._tiers
    trees = [forest.grow(Namespace(tree.adapter, tree.key)) for tree in state.trees]
    assert len(list(forest)) == len(trees), "a namespace has two trees"
    numbers = [next(forest._numbers) for _ in state.nodes]
    nodes: list[Node] = []
    for told in state.nodes:
        root = trees[told.tree].root
        node = root if told.parent is None else _grow(nodes[told.parent], told, page_size)
        node.number, node.last_use = numbers[told.age], told.last_use
        nodes.append(node)
    tiers._copies = list(state.copies)
    cache.num_host_dropped = state.num_host_dropped
    tiers.num_evicted, tiers.num_saved = state.num_evicted, state.num_saved
    tiers.num_restored, tiers.num_host_evicted = state.num_restored, state.num_host_evicted
    return nodes


def lock_again(cache: PrefixCache, node: Node) -> None:
    """Put back the lock of a running sequence; nothing has been used by that."""
    cache.num_locks += 1
    for above in node.path():
        above.locks += 1


def finish_cache(cache: PrefixCache, nodes: list[Node], private_pages: list[int]) -> None:
    """Draw from the nodes and their locks what is free, what could go, and in which order."""
    device, host = cache._tiers.device, cache._tiers.host
    cached = [node for node in nodes if node.parent is not None]
    _take(device.pool, [p for n in cached if not n.is_on_host for p in n.pages] + private_pages)
    _take(host.pool, [p for n in cached if n.is_on_host for p in n.pages])
    for node in cached:
        cache._tiers.of(node).enter(node)
    for node in cached:
        cache._tiers.of(node).offer(node)


def _grow(parent: Node, told: NodeState, page_size: int) -> Node:
    """Add a node below its parent."""
    num_pages = len(told.pages)
    assert num_pages and len(told.tokens) == num_pages * page_size, "a page is not full"
    ends = range(page_size, len(told.tokens) + 1, page_size)
    keys = [told.tokens[end - page_size : end] for end in ends]
    run = parent.run if told.continues else Run([], [])
    start = len(run.keys)
    run.keys += keys
    run.pages += told.pages
    node = Node(parent.tree, 0, parent, run, start, start + num_pages)
    node.is_on_host = told.is_on_host
    assert keys[0] not in parent.children, "two siblings begin alike"
    parent.children[keys[0]] = node
    parent.num_device_children += 0 if node.is_on_host else 1
    return node


def _take(pool: PagePool, pages: Iterable[int]) -> None:
    """Mark pages of a full pool as taken."""
    taken = sorted(pages)
    assert not taken or taken[0] >= 0 and taken[-1] < pool.num_pages, "a page that does not exist"
    for page in taken:
        assert pool._is_free[page], f"page {page} is taken twice"
        pool._is_free[page] = 0
    pool._num_used = taken[-1] + 1 if taken else 0
    pool._returned = [page for page in range(pool._num_used) if pool._is_free[page]]
