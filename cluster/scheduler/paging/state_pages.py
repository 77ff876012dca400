"""The states of recurrent and convolution layers that sequences hold: one page each.

A running sequence has a page of its own, which each of its chunks brings up to date in place. So a
state can be kept only between two chunks: a chunk ends where there is to be a checkpoint, and the
plan of the next one begins with a copy of the page into one that the tree owns. A sequence that is
resumed begins with a copy of that.
"""

from cluster.scheduler.kv_cache.checkpoint_pool import CheckpointPool
from cluster.scheduler.kv_cache.checkpoints import CheckpointPage, ids_of
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache.radix_tree import Match
from cluster.scheduler.sequence import Running
from worker.protocol import PageCopy


class StatePages:
    """What running sequences have of a pool of state pages."""

    def __init__(self, pool: CheckpointPool, cache: PrefixCache, page_size: int) -> None:
        self._pool = pool
        self._cache = cache
        self._page_size = page_size

    def fits(self, match: Match) -> bool:
        """Tell whether a sequence finds a page, beside the one that it begins with a copy of."""
        num_needed, num_available = 1, self._pool.num_available
        if match.checkpoint is not None:
            num_needed += 1 - match.checkpoint.num_on_device
            num_available -= match.checkpoint.num_unheld
        return num_needed <= num_available

    def take(self, match: Match, step: int) -> CheckpointPage:
        """Return a page with the state behind a matched prefix; without one the ranks clear it."""
        if match.checkpoint is None:
            (page,) = self._pool.allocate(1)
            return page
        kept = self._pool.take(match.checkpoint, step)
        page = self._copy(kept[0])
        self._pool.release(kept)
        return page

    def keep_before(self, running: Running, start: int, step: int) -> None:
        """Keep the state before a chunk from position `start`, which the plan is to have next.

        Where the step that computes it is still in flight, nothing is found there before its
        output has come: it may have failed.
        """
        if not self._pool.num_available:
            return
        page = self._copy(running.state_pages[0])
        running.state_pages.append(page)
        running.kept_states.append((start // self._page_size, page))
        self.keep_computed(running, step)

    def keep_computed(self, running: Running, step: int) -> None:
        """Let prefixes be resumed at those of the kept states that the tree has the pages before.

        Their copies are in a plan, if not in one that the ranks have seen.
        """
        while running.kept_states and running.kept_states[0][0] <= running.num_kept:
            at, page = running.kept_states.pop(0)
            self._cache.keep_checkpoint(running.lock, running.num_kept - at, [page], step)
            running.state_pages.remove(page)
            self._pool.release([page])

    def keep_last(self, running: Running, step: int) -> None:
        """Leave the page of a sequence that ends to the tree, if it ends with a full page."""
        at, rest = divmod(running.state_at, self._page_size)
        if at and not rest and running.state_at == running.num_computed:
            pages = running.state_pages[:1]
            self._cache.keep_checkpoint(running.lock, running.num_kept - at, pages, step)

    def free(self, running: Running) -> None:
        """Give all pages back."""
        self._pool.release(running.state_pages)
        running.state_pages, running.kept_states = [], []

    def _copy(self, source: CheckpointPage) -> CheckpointPage:
        (target,) = self._pool.allocate(1)
        source_id, target_id = ids_of([source, target])
        self._cache.note(PageCopy("fork", source_id, target_id, self._page_size, "state"))
        return target
