"""The pages of layers with a sliding window that sequences hold: given back as windows move on.

A sequence holds the pages that its next position sees, and those before its last full page, so that
it can be resumed there.
"""

from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.kv_cache.checkpoint_pool import CheckpointPool
from cluster.scheduler.kv_cache.checkpoints import CheckpointPage, ids_of
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache.radix_tree import Match
from cluster.scheduler.sequence import Running
from worker.protocol import PageCopy


class WindowPages:
    """What running sequences have of a pool of window pages."""

    def __init__(self, pool: CheckpointPool, cache: PrefixCache, config: SchedulerConfig) -> None:
        self._pool = pool
        self._cache = cache
        self._config = config
        self._page_size = config.page_size
        self._pages_behind = config.pages_behind

    @property
    def num_available(self) -> int:
        """Pages that could be had."""
        return self._pool.num_available

    def need(self, num_pages: int) -> int:
        """Return the pages that a sequence of so many full pages needs at once, at most."""
        return min(num_pages, self._config.most_window_pages)

    def fits(self, match: Match, num_pages: int, num_reserved: int) -> bool:
        """Tell whether a sequence of so many pages finds what it needs, beside those reserved."""
        num_needed, num_available = self.need(num_pages) + num_reserved, self._pool.num_available
        if match.checkpoint is not None:
            num_needed -= match.checkpoint.num_on_device
            num_available -= match.checkpoint.num_unheld
        return num_needed <= num_available

    def take(self, match: Match, step: int) -> list[CheckpointPage]:
        """Return the pages of a matched prefix, on the device."""
        return [] if match.checkpoint is None else self._pool.take(match.checkpoint, step)

    def allocate(self, running: Running, num_pages: int) -> tuple[int, ...]:
        """Append fresh pages to the page table and return them."""
        pages = self._pool.allocate(num_pages)
        running.window_pages += pages
        return ids_of(pages)

    def fork(self, source: Running, at: int, target: int, num_positions: int) -> None:
        """Copy the first positions of page `at` of the page table of `source`."""
        place = at - source.first_window
        (page,) = ids_of(source.window_pages[place : place + 1])
        self._cache.note(PageCopy("fork", page, target, num_positions, "window"))

    def move_on(self, running: Running) -> None:
        """Let go of the pages that no step from now on needs.

        A step in flight begins where the computed positions end, and the ranks are done with it
        before they begin the one after it, which may be given what this lets go.
        """
        first = running.num_computed // self._page_size - self._pages_behind
        num_left = first - running.first_window
        if num_left > 0:
            self._pool.release(running.window_pages[:num_left])
            del running.window_pages[:num_left]
            running.first_window = first

    def keep(self, running: Running, positions: list[int], step: int) -> None:
        """Let prefixes be resumed at positions, counted in pages, of what the tree has of it."""
        for at in positions:
            first = max(0, at - self._pages_behind)
            if first < running.first_window:
                continue  # of a prompt that was kept out of the cache until it was whole
            begin, end = first - running.first_window, at - running.first_window
            pages = running.window_pages[begin:end]
            self._cache.keep_checkpoint(running.lock, running.num_kept - at, pages, step)

    def free(self, running: Running) -> None:
        """Give all pages back."""
        self._pool.release(running.window_pages)
        running.window_pages = []
