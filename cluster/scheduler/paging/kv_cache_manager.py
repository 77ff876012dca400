"""The KV pages of sequences: matched in the prefix cache, allocated, cached when full, freed.

vLLM's KVCacheManager. A sequence's pages are known to its namespace's tree up to `num_kept`, and
private behind that. What it has in layers that keep only the end of a prefix is told in
`window_pages` and `state_pages`.

Owns where checkpoints are made: behind the last full page of a prompt that another one like it can
start on, where prompts part, behind every CHECKPOINT_PAGES pages of a prompt, and where a sequence
ends or is preempted.
"""

from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache.radix_tree import Match
from cluster.scheduler.paging.state_pages import StatePages
from cluster.scheduler.paging.window_pages import WindowPages
from cluster.scheduler.sequence import Running, Sequence
from worker.protocol import PageCopy

CHECKPOINT_PAGES = 16  # of a prompt there is a checkpoint behind every so many pages


class KVCacheManager:
    """What running sequences have of the prefix cache's pages."""

    def __init__(self, cache: PrefixCache, config: SchedulerConfig) -> None:
        self.cache = cache
        self._page_size = config.page_size
        self._is_caching = config.prefix_cache  # computed pages enter the prefix cache
        # Layers that keep only the end of a prefix have windows or states; None: they have none.
        self.windows: WindowPages | None = None
        self.states: StatePages | None = None
        if cache.checkpoints is not None and config.window:
            self.windows = WindowPages(cache.checkpoints, cache, config)
        elif cache.checkpoints is not None:
            self.states = StatePages(cache.checkpoints, cache, config.page_size)

    @property
    def num_available(self) -> int:
        """Pages that a page table could grow by."""
        if self.windows is None:
            return self.cache.num_available
        return min(self.cache.num_available, self.windows.num_available)

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
            match = self.cache.match(sequence.namespace, sequence.keys(num_pages))
            sequence.match, sequence.matched_at = match, (version, num_pages)
            sequence.parting = match.num_pages + match.num_passed if match.num_passed else 0
        return sequence.match

    def fits_ends(self, sequence: Sequence, num_reserved: int) -> bool:
        """Tell whether a sequence finds what it needs in layers that keep only the end of a prefix.

        `num_reserved` window pages are left for those that run.
        """
        if self.windows is not None:
            num_pages = self.num_pages(len(sequence.tokens))
            return self.windows.fits(self.match(sequence), num_pages, num_reserved)
        return self.states is None or self.states.fits(self.match(sequence))

    def take(self, sequence: Sequence, slot: int | None, match: Match, step: int) -> Running:
        """Lock a matched prefix, bring it onto the device; return who runs on it."""
        lock = self.cache.lock(match, step)
        window_pages = self.windows.take(match, step) if self.windows is not None else []
        state_pages = [self.states.take(match, step)] if self.states is not None else []
        num_computed = match.num_pages * self._page_size
        return Running(
            sequence=sequence,
            slot=slot,
            lock=lock,
            # The tree's pages; the sequence's to read while the lock stands.
            pages=[*match.pages, *self.cache.restore(lock, step)],
            num_kept=match.num_pages,
            num_computed=num_computed,
            score_from=sequence.num_scored,
            window_pages=window_pages,
            first_window=match.num_pages - len(window_pages),
            state_pages=state_pages,
            state_at=num_computed,
            states_kept_to=num_computed,
        )

    def allocate(self, running: Running, num_pages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Append fresh pages to the page tables, evicting as needed; return (pages, of windows)."""
        if not num_pages:
            return (), ()
        pages = self.cache.allocate(num_pages)
        running.pages += pages
        if self.windows is None:
            return tuple(pages), ()
        return tuple(pages), self.windows.allocate(running, num_pages)

    def fork(self, running: Running, source: Running, num_tokens: int) -> None:
        """Give a sequence that has just started a copy of the page that it shares in part.

        It then has the first `num_tokens` positions, as `source` has them.
        """
        at, num_positions = divmod(num_tokens, self._page_size)
        assert at == len(running.pages) and num_positions, "no page is shared in part"
        (target,), window_targets = self.allocate(running, 1)
        self.cache.note(PageCopy("fork", source.pages[at], target, num_positions))
        if self.windows is not None:
            self.windows.fork(source, at, window_targets[0], num_positions)
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
        if self.windows is not None:
            positions = _checkpoints_between(running.sequence, done, full, self._page_size)
            if ends and full and full not in positions:
                positions.append(full)
            self.windows.keep(running, positions, step)
        elif self.states is not None:
            self.states.keep_computed(running, step)
            if ends:
                self.states.keep_last(running, step)

    def next_checkpoint(self, sequence: Sequence, start: int, end: int) -> int:
        """Return where a chunk from `start` to `end` must end already, for a state is kept there.

        Nowhere, where layers have no states: `end`.
        """
        if self.states is None or not self._is_caching:
            return end
        size = self._page_size
        positions = _checkpoints_between(sequence, start // size, end // size, size)
        return min((at * size for at in positions), default=end)

    def keep_state(self, running: Running, start: int, step: int) -> None:
        """Keep the state before a chunk that begins at `start`, if there is to be a checkpoint."""
        if self.states is None or not self._is_caching or start <= running.states_kept_to:
            return
        at, rest = divmod(start, self._page_size)
        if not rest and _checkpoints_between(running.sequence, at - 1, at, self._page_size):
            self.states.keep_before(running, start, step)
            running.states_kept_to = start

    def free(self, running: Running, step: int, *, caches: bool) -> None:
        """Give all pages back; with `caches`, full ones stay in the namespace."""
        if caches:
            self.cache_full_pages(running, step, ends=True)
        self.cache.unlock(running.lock, step)
        self.cache.pool.free(running.private_pages())
        if self.windows is not None:
            self.windows.free(running)
        elif self.states is not None:
            self.states.free(running)


def _checkpoints_between(sequence: Sequence, done: int, full: int, page_size: int) -> list[int]:
    """Return where a prompt can be resumed, from behind page `done` to page `full`, in order."""
    positions = {*range(done - done % CHECKPOINT_PAGES, full + 1, CHECKPOINT_PAGES)}
    positions |= {(sequence.num_prompt_tokens - 1) // page_size, sequence.parting}
    return sorted(at for at in positions if done < at <= full)
