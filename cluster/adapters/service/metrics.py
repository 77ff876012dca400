"""Where routers enter their counts: the ledger, beside what the pool counts of itself.

Owns nothing but the ledger. Knows nothing of what routers count.
"""

import time

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.service.read_threads import ReadThreads
from cluster.metrics_hub import Ledger, Page, PoolCounts, RouterCounts


class CountDesk:
    """The ledger of one cluster, and what the pool adds to it."""

    def __init__(self, pool: AdapterCatalog, reads: ReadThreads) -> None:
        self._pool = pool
        self._reads = reads
        self._ledger = Ledger(time.monotonic)

    def enter(self, counts: RouterCounts, wants_all: bool) -> Page:
        """Keep what a router has counted; tell it which adapters to forget, and the rest if asked.

        One call, so that what it returns is never older than what another router was told.
        """
        self._ledger.enter(counts)
        names = {name for behind in counts.adapters.values() for name in behind}
        gone = tuple(sorted(name for name in names if name not in self._pool))
        if not wants_all:
            return Page(gone)
        return Page(gone, self._ledger.reports(), self._own())

    def _own(self) -> PoolCounts:
        host = self._pool.host_tier
        return PoolCounts(
            host_bytes=host.held_bytes,
            host_budget=host.budget,
            host_evictions=host.num_evicted,
            reads=dict(self._reads.results),
            read_seconds=self._reads.seconds.counts(),
        )
