"""Who gives way when a tenant that has less than its share finds no seat, or no pages.

A tenant's share of the seats, which are `max_running`, and of the pages is its weight's part of the
weights of all tenants that have sequences now. Who holds no more than that is never touched, and
what nobody else asks for may be held beyond it: work is taken back only for one that waits and is
the next in line, and only if by weight that one then holds no more than who gives way: nothing is
handed to and fro. The foremost running sequence goes on whatever its tenant holds, so that
something always ends.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass

from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.request_queue import Fairness
from cluster.scheduler.running import RunningSet
from cluster.scheduler.sequence import Running, Sequence


@dataclass(frozen=True, slots=True)
class _Resource:
    """What there is of seats or pages, and who holds how much of it."""

    size: int
    held: dict[str, int]  # by tenant

    def is_over(self, tenant: str, more: int, weights: dict[str, int]) -> bool:
        """Whether a tenant with so much more would hold more than its share."""
        held = self.held.get(tenant, 0) + more
        return held * sum(weights.values()) > self.size * weights[tenant]


class SharePolicy:
    """Chooses who gives way; changes nothing."""

    def __init__(self, config: SchedulerConfig, running: RunningSet, fairness: Fairness) -> None:
        self._config = config
        self._running = running
        self._fairness = fairness

    def for_seat(self, sequence: Sequence, spared: Container[int]) -> Running | None:
        """Return who should leave a seat to a sequence that waits, if anybody but the spared."""
        seats: dict[str, int] = {}
        for running in self._running.by_id.values():
            tenant = running.sequence.flow.tenant
            seats[tenant] = seats.get(tenant, 0) + 1
        seat = _Resource(self._config.max_running, seats)
        return self._victim(sequence, seat, 1, spared, lambda _: 1)

    def for_pages(
        self, sequence: Sequence, num_pages: int, spared: Container[int]
    ) -> Running | None:
        """Return who should leave its pages to a sequence that needs so many, as `for_seat`."""
        pages: dict[str, int] = {}
        for running in self._running.by_id.values():
            tenant = running.sequence.flow.tenant
            pages[tenant] = pages.get(tenant, 0) + len(running.pages)
        page = _Resource(self._config.num_pages, pages)
        return self._victim(sequence, page, num_pages, spared, lambda running: len(running.pages))

    def _victim(
        self,
        sequence: Sequence,
        resource: _Resource,
        needed: int,
        spared: Container[int],
        size: Callable[[Running], int],
    ) -> Running | None:
        """Return the hindmost of the tenant that is furthest over its share, if one is.

        Of a higher priority than the one that waits nobody gives way.
        """
        if not self._fairness.enabled:
            return None
        tenant, weights = sequence.flow.tenant, self._fairness.weights()
        own = resource.held.get(tenant, 0)
        if own and resource.is_over(tenant, needed, weights):
            return None
        over = [one for one in resource.held if one != tenant and resource.is_over(one, 0, weights)]
        # held / weight of one is more than that of another: compared without a division.
        heavy = sum(weights.values())
        over.sort(key=lambda one: (-resource.held[one] * heavy // weights[one], one))
        foremost = self._running.foremost()
        for one in over:
            left = (own + needed) * weights[one]
            candidates = [
                running
                for running in self._running.by_id.values()
                if running.sequence.flow.tenant == one
                and running is not foremost
                and running.seq_id not in spared
                and running.sequence.flow.priority >= sequence.flow.priority
                and left <= (resource.held[one] - size(running)) * weights[tenant]
            ]
            if candidates:
                return max(candidates, key=lambda running: running.sequence.order)
        return None
