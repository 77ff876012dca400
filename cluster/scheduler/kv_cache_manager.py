"""The KV pages of sequences: matched in the prefix cache, allocated, cached when full, freed.

vLLM's KVCacheManager. A sequence's pages are known to its namespace's tree up to `num_kept`, and
private behind that.
"""

from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache.radix_tree import Match, Node
from cluster.scheduler.sequence import Running, Sequence
from worker.protocol import PageCopy


class KVCacheManager:
    """What running sequences have of the prefix cache's pages."""

    def __init__(self, cache: PrefixCache, page_size: int, enable_prefix_cache: bool) -> None:
        self.cache = cache
        self._page_size = page_size
        self._is_caching = enable_prefix_cache  # computed pages enter the prefix cache

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

    def take(self, match: Match, step: int) -> tuple[Node, list[int]]:
        """Lock a matched prefix, bring it onto the device; return (lock, its pages)."""
        lock = self.cache.lock(match, step)
        # The tree's pages; the sequence's to read while the lock stands.
        return lock, [*match.pages, *self.cache.restore(lock, step)]

    def allocate(self, running: Running, num_pages: int) -> tuple[int, ...]:
        """Append fresh pages to the page table, evicting as needed, and return them."""
        if not num_pages:
            return ()
        pages = self.cache.allocate(num_pages)
        running.pages += pages
        return tuple(pages)

    def fork(self, running: Running, source: Running, num_tokens: int) -> None:
        """Give a sequence that has just started a copy of the page that it shares in part.

        It then has the first `num_tokens` positions, as `source` has them.
        """
        at, num_positions = divmod(num_tokens, self._page_size)
        assert at == len(running.pages) and num_positions, "no page is shared in part"
        (target,) = self.cache.allocate(1)
        self.cache.note(PageCopy("fork", source.pages[at], target, num_positions))
        running.pages.append(target)
        running.num_computed = num_tokens

    def cache_full_pages(self, running: Running, step: int) -> None:
        """Hand every page that is full and computed to the sequence's own namespace."""
        done, full = running.num_kept, running.num_computed // self._page_size
        if full == done or not self._is_caching:
            return
        # Pages [done, full) become the tree's; those it had already stay ours as duplicates.
        running.lock, refused = self.cache.insert(
            running.lock, running.sequence.keys(full)[done:], running.pages[done:full], step
        )
        running.duplicates += refused
        running.num_kept = full

    def free(self, running: Running, step: int, *, caches: bool) -> None:
        """Give all pages back; with `caches`, full ones stay in the namespace."""
        if caches:
            self.cache_full_pages(running, step)
        self.cache.unlock(running.lock, step)
        self.cache.pool.free(running.private_pages())
