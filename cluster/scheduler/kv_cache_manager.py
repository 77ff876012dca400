"""The one place where a sequence's status changes and what it holds moves with it.

Owns the hand-overs between sequences, prefix cache and slot table. Decides nothing.
"""

from cluster.request import BASE
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache.radix_tree import Match
from cluster.scheduler.lora_slots import SlotTable
from cluster.scheduler.sequence import Running, Sequence, Status
from worker.protocol import PageCopy


class KVCacheManager:
    """Moves pages, locks and leases."""

    def __init__(
        self, cache: PrefixCache, slots: SlotTable, page_size: int, keeps_pages: bool
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._page_size = page_size
        self._keeps_pages = keeps_pages  # computed pages enter the prefix cache

    def start(self, sequence: Sequence, match: Match, step: int) -> Running:
        """Waiting to running: lock the matched prefix, on the device, and lease the adapter."""
        assert sequence.status is Status.WAITING, f"sequence {sequence.seq_id} is not waiting"
        adapter = sequence.request.adapter
        slot = None if adapter == BASE else self._slots.lease(adapter, step)
        lock = self._cache.lock(match, step)
        # The tree's pages; ours to read while the lock stands.
        pages = [*match.pages, *self._cache.restore(lock, step)]
        sequence.status = Status.RUNNING
        return Running(
            sequence=sequence,
            slot=slot,
            lock=lock,
            pages=pages,
            num_kept=len(pages),
            num_computed=len(pages) * self._page_size,
        )

    def fork(self, running: Running, source: Running, num_tokens: int) -> None:
        """Give a sequence that has just started a copy of the page that it shares in part.

        It then has the first `num_tokens` positions, as `source` has them.
        """
        at, num_positions = divmod(num_tokens, self._page_size)
        assert at == len(running.pages) and num_positions, "no page is shared in part"
        (target,) = self._cache.allocate(1)
        self._cache.note(PageCopy("fork", source.pages[at], target, num_positions))
        running.pages.append(target)
        running.num_computed = num_tokens

    def grow(self, running: Running, num_pages: int) -> tuple[int, ...]:
        """Append fresh pages to the page table, evicting as needed, and return them."""
        if not num_pages:
            return ()
        pages = self._cache.allocate(num_pages)
        running.pages += pages
        return tuple(pages)

    def keep(self, running: Running, step: int) -> None:
        """Hand every page that is full and computed to the sequence's own namespace."""
        done, full = running.num_kept, running.num_computed // self._page_size
        if full == done or not self._keeps_pages:
            return
        # Pages [done, full) become the tree's; those it had already stay ours as duplicates.
        running.lock, refused = self._cache.insert(
            running.lock, running.sequence.keys(full)[done:], running.pages[done:full], step
        )
        running.duplicates += refused
        running.num_kept = full

    def preempt(self, running: Running, step: int) -> None:
        """Running to waiting: full pages stay in the namespace, everything else is given back."""
        self.keep(running, step)
        self._give_back(running, Status.WAITING, step)

    def finish(self, running: Running, step: int) -> None:
        """Running to finished: full pages stay in the namespace, everything else is given back."""
        self.keep(running, step)
        self._give_back(running, Status.FINISHED, step)

    def discard(self, running: Running, step: int) -> None:
        """Running to finished, and the cache gets nothing more of what it computed."""
        self._give_back(running, Status.FINISHED, step)

    def _give_back(self, running: Running, status: Status, step: int) -> None:
        assert running.sequence.status is Status.RUNNING, f"sequence {running.seq_id} stops twice"
        self._cache.unlock(running.lock, step)
        self._cache.pool.free(running.private_pages())
        if running.slot is not None:
            self._slots.release(running.adapter, step)
        running.sequence.status = status
