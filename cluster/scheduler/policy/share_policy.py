"""Who gives way when a tenant that has less than its share finds no seat, no pages, a full step.

A tenant's share of the seats, which are `max_running`, and of the pages is its weight's part of the
weights of all tenants that have sequences now. Who holds no more than that is never touched, and
what nobody else asks for may be held beyond it: work is taken back only for one that waits and is
the next in line, and only if by weight that one then holds no more than who gives way: nothing is
handed to and fro. The foremost running sequence goes on whatever its tenant holds, so that
something always ends.

A first token comes soon if those who run more than their share leave the step in which its prompt
begins to whoever has had less: `over` and `deferred_for` say who they are. They lose that step, no
seat and no page.
"""

from collections.abc import Callable, Container
from fractions import Fraction

from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.lora_slots import SlotTable
from cluster.scheduler.request_queue import Fairness, RequestQueue, TenantShare
from cluster.scheduler.running import RunningSet
from cluster.scheduler.sequence import Running, Sequence
from cluster.scheduler.tenants import Tenants


class SlotShares:
    """Which adapters stay in their slots while others ask for more."""

    def __init__(self, slots: SlotTable, waiting: RequestQueue, tenants: Tenants) -> None:
        self._slots = slots
        self._waiting = waiting
        self._tenants = tenants

    def spared(self, claimant: str) -> frozenset[int]:
        """Return the slots that no adapter should take which is wanted by others only.

        They were used last by tenants that hold no more than their share of the slots, and have
        sequences or had some lately: who asks now and then finds its adapter where it was.
        """
        weights = self._tenants.contenders()
        if len(weights) < 2:
            return frozenset()
        wanting, slots = self._waiting.tenants(claimant), self._slots
        held: dict[str, list[int]] = {}
        for resident in slots.residents():
            if resident.tenant in weights and resident.tenant not in wanting:
                held.setdefault(resident.tenant, []).append(resident.slot)
        total = sum(weights.values())
        return frozenset(
            slot
            for tenant, places in held.items()
            if len(places) * total <= slots.num_slots * weights[tenant]
            for slot in places
        )


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

    def for_window_pages(
        self, sequence: Sequence, num_pages: int, spared: Container[int]
    ) -> Running | None:
        """Return who should leave its window pages to one that needs so many, as `for_seat`."""
        size = self._config.num_window_pages
        return self._victim(sequence, num_pages, size, spared, lambda one: len(one.window_pages))

    def over(self) -> tuple[str, ...]:
        """Return the tenants that run more than their share if one more of another tenant runs.

        The others are those that have sequences, or had some lately.
        """
        weights = self._fairness.tenants.contenders()
        if len(weights) < 2:
            return ()
        held: dict[str, int] = {}
        for running in self._running.by_id.values():
            tenant = running.sequence.flow.tenant
            held[tenant] = held.get(tenant, 0) + 1
        size, total = len(self._running) + 1, sum(weights.values())
        return tuple(one for one, count in held.items() if count * total > size * weights[one])

    def deferred_for(self, share: TenantShare, over: Container[str]) -> tuple[TenantShare, ...]:
        """Return whose running work leaves a step to a prompt that begins, of those `over`.

        That is who has had more than the tenant of the prompt, or is of a lower priority.
        """
        running = {one.sequence.flow.share: None for one in self._running.by_id.values()}
        return tuple(
            one
            for one in running
            if one.key in over
            and one.key != share.key
            and (one.priority, one.counter) > (share.priority, share.counter)
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
        weights = self._fairness.tenants.weights()
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
