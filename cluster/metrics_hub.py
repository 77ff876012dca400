"""What all routers have counted, kept in one place, so that each of them can show all of it.

A load balancer sends a scrape to any router. If each showed what it last heard of the others, a
counter could be smaller in one scrape than in the one before, which Prometheus takes for a restart
and adds wholly. So there is one ledger: a router that is scraped enters its own counts and reads
everybody's in one call, and no entry ever gives way to an older one.

What a router has counted stays for some scrapes after it ended, so that its last counts are seen.
Knows nothing of what the counts mean, and nothing of how it is reached.
"""

from collections.abc import Callable

import msgspec

from cluster.histogram import HistogramCounts

KEPT_SECONDS = 600.0  # after the last entry of a router
Series = tuple[tuple[tuple[str, ...], float], ...]  # label values and count


class RouterCounts(msgspec.Struct, frozen=True):
    """Everything that one router counts, as of one moment."""

    router: str
    number: int  # of its entries: 1, 2, 3, ...
    counters: dict[str, Series]  # by name
    histograms: dict[str, HistogramCounts]
    adapters: dict[str, tuple[str, ...]]  # names behind each adapter label of its series
    num_in_flight: int  # answers
    has_ended: bool = False  # nothing will be added


class RouterReport(msgspec.Struct, frozen=True):
    """A router's last entry."""

    counts: RouterCounts
    age: float  # seconds


class PoolCounts(msgspec.Struct, frozen=True):
    """What the adapter pool counts and measures of itself; sizes in bytes."""

    host_bytes: int
    host_budget: int
    host_evictions: int
    reads: dict[str, int]  # of adapter directories, by result
    read_seconds: HistogramCounts


class Page(msgspec.Struct, frozen=True):
    """The answer to an entry."""

    gone: tuple[str, ...]  # of the adapters that it names, those that are not registered any more
    routers: tuple[RouterReport, ...] = ()  # ordered by router; only if asked for
    pool: PoolCounts | None = None  # likewise


class Ledger:
    """The last entry of every router; `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[str, tuple[RouterCounts, float]] = {}

    def enter(self, counts: RouterCounts) -> None:
        """Keep a router's counts, unless later ones have come before them."""
        held = self._entries.get(counts.router)
        if held is None or held[0].number < counts.number:
            self._entries[counts.router] = counts, self._clock()

    def reports(self) -> tuple[RouterReport, ...]:
        """Return what all routers have counted, also those that ended not long ago."""
        now = self._clock()
        self._entries = {
            router: (counts, entered)
            for router, (counts, entered) in self._entries.items()
            if now - entered <= KEPT_SECONDS
        }
        return tuple(
            RouterReport(counts, now - entered)
            for _, (counts, entered) in sorted(self._entries.items())
        )
