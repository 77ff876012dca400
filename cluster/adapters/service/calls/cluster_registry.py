"""The registry of the cluster: what schedulers and routers ask the pool that is not of adapters."""

import time

from cluster.adapters.service.calls.in_flight import InFlightCalls, pool_query
from cluster.adapters.service.pool_state import PoolState
from cluster.adapters.service.registry import SchedulerRegistry
from cluster.adapters.service.usage_file import UsageFile
from cluster.messages import AttachedSchedulers, SchedulerAddress
from cluster.metrics_hub import ClusterCounts, MetricsHub, RouterCounts
from cluster.tenancy.budget_ledger import BudgetLedger
from cluster.tenancy.leases import LeaseCall, LeaseReply


class ClusterRegistry:
    """Methods of the pool's actor."""

    _calls: InFlightCalls
    _state: PoolState
    _registry: SchedulerRegistry
    _left_at: float | None = None  # on the monotonic clock: when a scheduler left in order
    _hub: MetricsHub
    _ledger: BudgetLedger
    _usage: UsageFile

    @pool_query
    async def attach(self, address: SchedulerAddress) -> None:
        """Make a scheduler replica known; the latest address of a replica counts."""
        await self._registry.attach(address)

    async def detach(self, replica: str) -> None:
        """Forget a scheduler replica that has ended."""
        self._left_at = time.monotonic()
        await self._registry.detach(replica)

    @pool_query
    async def schedulers(self) -> AttachedSchedulers:
        """Return all attached scheduler replicas."""
        since = None if self._left_at is None else time.monotonic() - self._left_at
        return AttachedSchedulers(self._registry.addresses, since)

    async def report(self, counts: RouterCounts, wants_all: bool) -> ClusterCounts:
        """Keep what a router has counted; return what it wants to know."""
        self._usage.take_in(counts)
        return self._hub.report(counts, wants_all)

    async def lease(self, call: LeaseCall) -> LeaseReply:
        """Take in what a router says of its limits' accounts; grant what it claims."""
        return self._ledger.lease(call, time.monotonic())

    @pool_query
    async def drain(self) -> None:
        """Let all routers of the cluster refuse new calls, later ones too."""
        await self._state.drain(is_drained=True)

    @pool_query
    async def undrain(self) -> None:
        """Let routers take calls again."""
        await self._state.drain(is_drained=False)

    @pool_query
    async def is_drained(self) -> bool:
        """Return whether routers are to refuse new calls."""
        return self._state.is_drained
