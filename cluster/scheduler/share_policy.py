"""Who gives way when a tenant that has less than its share finds no seat, or no pages.

A tenant's share of the seats, which are `max_running`, and of the pages is its weight's part of the
weights of all tenants that have sequences now. Who holds no more than that is never touched, and
what nobody else asks for may be held beyond it: work is taken back only for one that waits and is
the next in line, and only if by weight that one then holds no more than who gives way: nothing is
handed to and fro. The foremost running sequence goes on whatever its tenant holds, so that
something always ends.
"""

from collections.abc import Callable, Container
from fractions import Fraction

from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.request_queue import Fairness
from cluster.scheduler.running import RunningSet
from cluster.scheduler.sequence import Running, Sequence


class SharePolicy:
    """Chooses who gives way; changes nothing."""

    def __init__(self, config: SchedulerConfig, running: RunningSet, fairness: Fairness) -> None:
        self._config = config
        self._running = running
        self._fairness = fairness

    def for_seat(self, sequence: Sequence, spared: Container[int]) -> Running | None:
        """Return who should leave a seat to a sequence that waits, if anybody but the spared."""
        return self._victim(sequence, 1, self._config.max_running, spared, lambda _: 1)

    def for_pages(
        self, sequence: Sequence, num_pages: int, spared: Container[int]
    ) -> Running | None:
        """Return who should leave its pages to a sequence that needs so many, as `for_seat`."""
        return self._victim(
            sequence, num_pages, self._config.num_pages, spared, lambda one: len(one.pages)
        )

    def _victim(
        self,
        sequence: Sequence,
        needed: int,
        size: int,
        spared: Container[int],
        held_by: Callable[[Running], int],
    ) -> Running | None:
        """Return the hindmost of the tenant that is furthest over its share, if one is.

        Of a higher priority than the one that waits nobody gives way. `size` is how much there is.
        """
        weights = self._fairness.weights()
        if len(weights) < 2:  # as with fairness off: it would be taken from oneself
            return None
        held = dict.fromkeys(weights, 0)
        for running in self._running.by_id.values():
            held[running.sequence.flow.tenant] += held_by(running)
        total, tenant = sum(weights.values()), sequence.flow.tenant
        own = held[tenant]
        if own and (own + needed) * total > size * weights[tenant]:
            return None
        over = [one for one in held if one != tenant and held[one] * total > size * weights[one]]
        over.sort(key=lambda one: (-Fraction(held[one], weights[one]), one))
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
                and left <= (held[one] - held_by(running)) * weights[tenant]
            ]
            if candidates:
                return max(candidates, key=lambda running: running.sequence.order)
        return None
