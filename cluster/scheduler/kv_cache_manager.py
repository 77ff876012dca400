"""The KV pages of sequences: matched in the prefix cache, allocated, cached when full, freed.

vLLM's KVCacheManager. A sequence's pages are known to its namespace's tree up to `num_kept`, and
private behind that. Of layers with a window it holds the last pages only, as many as its next
position sees, and those before its last full page, so that it can be resumed there.

Owns where checkpoints are made: behind the last full page of a prompt that another one like it can
start on, where prompts part, behind every CHECKPOINT_PAGES pages of a prompt, and where a sequence
ends or is preempted.
"""

from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.kv_cache.checkpoints import CHECKPOINT_PAGES, CheckpointPage, ids_of
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache.radix_tree import Match, Node
from cluster.scheduler.sequence import Running, Sequence
from worker.protocol import PageCopy


class KVCacheManager:
    """What running sequences have of the prefix cache's pages."""

    def __init__(self, cache: PrefixCache, config: SchedulerConfig) -> None:
        self.cache = cache
        self._config = config
        self._page_size = config.page_size
        self._is_caching = config.prefix_cache  # computed pages enter the prefix cache
        self._window = cache.checkpoints  # None: no layer has a window
        self._pages_behind = config.pages_behind if config.window else 0

    @property
    def has_windows(self) -> bool:
        """Whether some layers have pages of their own, of which a sequence holds the last."""
        return self._window is not None

    @property
    def num_available(self) -> int:
        """Pages that a page table could grow by."""
        if self._window is None:
            return self.cache.num_available
        return min(self.cache.num_available, self._window.num_available)

    def num_pages(self, num_tokens: int) -> int:
        """Return the pages that so many tokens take."""
        return -(-num_tokens // self._page_size)

    def match(self, sequence: Sequence) -> Match:
        """Return the cached prefix, short of the last token: its logits must be computed.

        So must all of a prompt whose mean is asked for, and what is not scored yet of one whose
        log-probabilities are.

        A waiting sequence may be asked for at every step: it is matched anew only when its
        namespace's tree has changed.
        """
        num_pages = (len(sequence.tokens) - 1) // self._page_size if self._is_caching else 0
        if sequence.computes_whole_prompt:
            num_pages = min(num_pages, sequence.num_scored // self._page_size)
        version = self.cache.version(sequence.namespace)
        if sequence.match is None or sequence.matched_at != (version, num_pages):
            sequence.match = self.cache.match(sequence.namespace, sequence.keys(num_pages))
            sequence.matched_at = (version, num_pages)
        return sequence.match

    def take(self, match: Match, step: int) -> tuple[Node, list[int], list[CheckpointPage]]:
        """Lock a matched prefix, bring it onto the device; return (lock, its pages, of windows)."""
        lock = self.cache.lock(match, step)
        window_pages: list[CheckpointPage] = []
        if self._window is not None and match.checkpoint is not None:
            window_pages = self._window.take(match.checkpoint, step)
        # The tree's pages; the sequence's to read while the lock stands.
        return lock, [*match.pages, *self.cache.restore(lock, step)], window_pages

    def fits_window(self, match: Match, num_tokens: int, num_reserved: int) -> bool:
        """Tell whether a sequence finds the window pages that it needs, beside those reserved."""
        if self._window is None:
            return True
        num_needed = self.window_need(num_tokens) + num_reserved
        num_available = self._window.num_available
        if match.checkpoint is not None:
            num_needed -= match.checkpoint.num_on_device
            num_available -= match.checkpoint.num_unheld
        return num_needed <= num_available

    def window_need(self, num_tokens: int) -> int:
        """Return the window pages that a sequence of so many tokens needs at once, at most."""
        return min(self.num_pages(num_tokens), self._config.most_window_pages)

    def allocate(self, running: Running, num_pages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Append fresh pages to the page table, evicting as needed; return (pages, of windows)."""
        if not num_pages:
            return (), ()
        pages = self.cache.allocate(num_pages)
        running.pages += pages
        if self._window is None:
            return tuple(pages), ()
        window_pages = self._window.allocate(num_pages)
        running.window_pages += window_pages
        return tuple(pages), ids_of(window_pages)

    def fork(self, running: Running, source: Running, num_tokens: int) -> None:
        """Give a sequence that has just started a copy of the page that it shares in part.

        It then has the first `num_tokens` positions, as `source` has them.
        """
        at, num_positions = divmod(num_tokens, self._page_size)
        assert at == len(running.pages) and num_positions, "no page is shared in part"
        (target,), window_targets = self.allocate(running, 1)
        self.cache.note(PageCopy("fork", source.pages[at], target, num_positions))
        if window_targets:
            (page,) = ids_of(source.window_pages[at - source.first_window :][:1])
            self.cache.note(PageCopy("fork", page, window_targets[0], num_positions, "window"))
        running.num_computed = num_tokens

    def cache_full_pages(self, running: Running, step: int, *, ends: bool = False) -> None:
        """Hand every page that is full and computed to the sequence's own namespace.

        Args:
            running: whose.
            step: now.
            ends: it can be resumed behind the last of them.
        """
        done, full = running.num_kept, running.num_computed // self._page_size
        if not self._is_caching or (full == done and not ends):
            return
        # Pages [done, full) become the tree's; those it had already stay ours as duplicates.
        if full > done:
            running.lock, refused = self.cache.insert(
                running.lock, running.sequence.keys(full)[done:], running.pages[done:full], step
            )
            running.duplicates += refused
            running.num_kept = full
        if self._window is not None:
            self._keep_checkpoints(running, done, step, ends=ends)

    def leave_pages_behind(self, running: Running) -> None:
        """Let go of the window pages that no step from now on needs.

        A step in flight, which begins where the computed positions end, is none of the ranks' later
        ones: what it reads may be given out to the step after it.
        """
        if self._window is None:
            return
        first = running.num_computed // self._page_size - self._pages_behind
        num_left = first - running.first_window
        if num_left > 0:
            self._window.release(running.window_pages[:num_left])
            del running.window_pages[:num_left]
            running.first_window = first

    def free(self, running: Running, step: int, *, caches: bool) -> None:
        """Give all pages back; with `caches`, full ones stay in the namespace."""
        if caches:
            self.cache_full_pages(running, step, ends=True)
        self.cache.unlock(running.lock, step)
        self.cache.pool.free(running.private_pages())
        if self._window is not None:
            self._window.release(running.window_pages)
            running.window_pages = []

    def _keep_checkpoints(self, running: Running, done: int, step: int, *, ends: bool) -> None:
        """Let prefixes be resumed behind some of the full pages from `done` on."""
        full = running.num_kept
        whole_prompt = (running.sequence.num_prompt_tokens - 1) // self._page_size
        wanted = {*range(done - done % CHECKPOINT_PAGES + CHECKPOINT_PAGES, full, CHECKPOINT_PAGES)}
        wanted |= {at for at in (whole_prompt, running.parting) if done < at <= full}
        if full % CHECKPOINT_PAGES == 0 or ends:
            wanted.add(full)
        for at in sorted(wanted):
            first = max(0, at - self._pages_behind)
            if at == 0 or first < running.first_window:
                continue  # of a prompt that was kept out of the cache until it was whole
            begin, end = first - running.first_window, at - running.first_window
            pages = running.window_pages[begin:end]
            self.cache.keep_checkpoint(running.lock, full - at, pages, step)
