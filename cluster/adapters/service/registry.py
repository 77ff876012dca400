"""Where the cluster meets: schedulers attach here, routers find them and tell what they count.

It is part of the adapter pool's process, which all of them know. Knows nothing of adapters.
"""

import ray

from cluster.adapters.service.metrics import CountDesk
from cluster.adapters.service.scheduler_links import SchedulerLinks
from cluster.messages import SchedulerAddress
from cluster.metrics_hub import Page, RouterCounts


class Registry:
    """What schedulers and routers ask an actor for; a part of one."""

    def __init__(self, links: SchedulerLinks, counts: CountDesk) -> None:
        self._links = links
        self._counts = counts
        self._is_drained = False

    @ray.method
    async def attach(self, address: SchedulerAddress) -> None:
        """Make a scheduler replica known; the latest address of a replica counts."""
        await self._links.attach(address)

    @ray.method
    async def detach(self, replica: str) -> None:
        """Forget a scheduler replica that has ended."""
        await self._links.detach(replica)

    @ray.method
    async def schedulers(self) -> tuple[SchedulerAddress, ...]:
        """Return all attached scheduler replicas in order of their names."""
        return self._links.addresses

    @ray.method
    async def enter(self, counts: RouterCounts, wants_all: bool) -> Page:
        """Keep what a router has counted; return what it wants to know."""
        return self._counts.enter(counts, wants_all)

    @ray.method
    async def drain(self) -> None:
        """Let all routers of the cluster refuse new calls, later ones too."""
        self._is_drained = True

    @ray.method
    async def is_drained(self) -> bool:
        """Return whether routers are to refuse new calls."""
        return self._is_drained
