"""The counts of all routers and of the adapter pool in one place, for any router to show.

A load balancer sends a scrape to any router. If each showed what it last heard of the others, a
counter could be smaller in one scrape than in the one before, which Prometheus takes for a restart
and adds wholly. So there is one hub: a router that is scraped reports its own counts and reads
everybody's in one call, and no report ever gives way to an older one.

What a router has counted stays for some scrapes after it ended, so that its last counts are seen.
"""

from collections.abc import Callable

import msgspec

from cluster.histogram import HistogramCounts
from cluster.tenancy.usage import Usage

KEPT_SECONDS = 600.0  # after the last report of a router
Series = tuple[tuple[tuple[str, ...], float], ...]  # label values and count


class RouterCounts(msgspec.Struct, frozen=True):
    """Everything that one router counts, as of one moment."""

    router: str
    number: int  # of its reports: 1, 2, 3, ...
    counters: dict[str, Series]  # by name
    histograms: dict[str, HistogramCounts]
    adapters: dict[str, tuple[str, ...]]  # names behind each adapter label of its series
    num_in_flight: int  # answers
    usage: dict[str, Usage] = {}  # by tenant, of all of them
    has_ended: bool = False  # nothing will be added
    key_file_loaded: float | None = None  # seconds since 1970; None: it has no keys


class RouterReport(msgspec.Struct, frozen=True):
    """A router's last report."""

    counts: RouterCounts
    age: float  # seconds


class PoolCounts(msgspec.Struct, frozen=True):
    """What the adapter pool counts and measures of itself; sizes in bytes."""

    host_bytes: int
    host_budget: int
    host_evictions: int
    reads: dict[str, int]  # of adapter directories, by result
    read_seconds: HistogramCounts
    task_failures: dict[str, int] = {}  # of background tasks that ended unasked, by name


class ClusterCounts(msgspec.Struct, frozen=True):
    """The answer to a report."""

    gone: tuple[str, ...]  # of the adapters that it names, those that are not registered any more
    routers: tuple[RouterReport, ...] = ()  # ordered by router; only if asked for
    pool: PoolCounts | None = None  # likewise


class MetricsHub:
    """The last report of every router, and what the pool counts of itself.

    `clock` gives seconds; `is_registered` tells whether an adapter has a name in the catalogue.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        is_registered: Callable[[str], bool],
        pool_counts: Callable[[], PoolCounts],
    ) -> None:
        self._clock = clock
        self._is_registered = is_registered
        self._pool_counts = pool_counts
        self._reports: dict[str, tuple[RouterCounts, float]] = {}  # and when they came, by router

    def report(self, counts: RouterCounts, wants_all: bool) -> ClusterCounts:
        """Keep a router's counts, unless later ones have come before them; answer what it asks.

        One call, so that what it returns is never older than what another router was given.
        """
        kept = self._reports.get(counts.router)
        if kept is None or kept[0].number < counts.number:
            self._reports[counts.router] = counts, self._clock()
        names = {name for some in counts.adapters.values() for name in some}
        gone = tuple(sorted(name for name in names if not self._is_registered(name)))
        if not wants_all:
            return ClusterCounts(gone)
        return ClusterCounts(gone, self.reports(), self._pool_counts())

    def reports(self) -> tuple[RouterReport, ...]:
        """Return what all routers have counted, also those that ended not long ago."""
        now = self._clock()
        self._reports = {
            router: (counts, came)
            for router, (counts, came) in self._reports.items()
            if now - came <= KEPT_SECONDS
        }
        return tuple(
            RouterReport(counts, now - came) for _, (counts, came) in sorted(self._reports.items())
        )
