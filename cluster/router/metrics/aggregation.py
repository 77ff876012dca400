"""The metrics of all routers: this one enters its counts into the metrics hub and reads all.

Owns when that happens: at intervals, so that little is lost with a router that dies; at a scrape;
and once more at the end.
"""

import asyncio
from contextlib import suppress

from cluster.errors import Unavailable
from cluster.metrics_hub import ClusterCounts, RouterReport
from cluster.router.backend import Backend
from cluster.router.metrics.request_metrics import RouterMetrics

INTERVAL = 5.0  # seconds between entries
SILENCE = 3 * INTERVAL  # without an entry, a router is taken for dead


class MetricsAggregation:
    """One router's link to the metrics hub; belongs to one event loop."""

    def __init__(
        self, router: str, metrics: RouterMetrics, backend: Backend, timeout: float
    ) -> None:
        self._router = router
        self._metrics = metrics
        self._backend = backend
        self._timeout = timeout  # seconds for one entry

    async def run(self) -> None:
        """Enter the counts at intervals until cancelled."""
        while True:
            await self.flush()  # what one misses is in the next
            await asyncio.sleep(INTERVAL)

    async def flush(self) -> None:
        """Enter what has been counted so far, if the hub can be reached."""
        with suppress(Unavailable):
            await self._enter(wants_all=False)

    async def close(self) -> None:
        """Enter the last counts; nothing may be counted afterwards."""
        with suppress(Unavailable):
            await self._enter(wants_all=False, has_ended=True)

    async def collect(self) -> ClusterCounts:
        """Return what all routers have counted; without the hub, this one alone.

        The hub lives in one process and dies with it: after a restart it knows nothing older than
        what is shown here meanwhile.
        """
        try:
            return await self._enter(wants_all=True)
        except Unavailable:
            return ClusterCounts((), (RouterReport(self._metrics.counts(self._router), 0.0),))

    async def _enter(self, *, wants_all: bool, has_ended: bool = False) -> ClusterCounts:
        counts = self._metrics.counts(self._router, has_ended=has_ended)
        try:
            async with asyncio.timeout(self._timeout):
                cluster = await self._backend.report(counts, wants_all)
        except TimeoutError:
            raise Unavailable("the metrics hub does not answer") from None
        for adapter in cluster.gone:
            self._metrics.forget_adapter(adapter)
        return cluster
