"""Scheduler replicas as the adapter pool sees them: leases, fences and slots, without sequences."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from msgspec import structs

from cluster.engine.status import EngineStatus
from cluster.errors import NotFound, Unavailable
from cluster.messages import SchedulerAddress, Status, Unloaded


class Replica:
    """Counts leases; an unload is answered when those of its adapter are gone."""

    def __init__(self, name: str = "0") -> None:
        self.address = SchedulerAddress(name, "127.0.0.1", 1, b"")
        self.leases: Counter[str] = Counter()
        self.pinned: dict[str, int] = {}
        self.unloaded: list[str] = []
        self.aborted: list[str] = []
        self.is_hung = False
        self.is_down = False
        self.num_connections = 0
        self._gone: set[str] = set()  # unloaded, and not leased since
        self._fenced: dict[str, list[asyncio.Future[Unloaded]]] = {}

    def lease(self, adapter: str) -> None:
        """Begin a request."""
        if adapter in self._fenced:
            raise NotFound(f"adapter {adapter} is being unloaded", "model")
        self.leases[adapter] += 1
        self._gone.discard(adapter)

    def release(self, adapter: str) -> None:
        """End a request, unless it was aborted."""
        if self.leases[adapter]:
            self.leases[adapter] -= 1
        self._settle()

    def fence(self, adapter: str, force: bool) -> asyncio.Future[Unloaded]:
        """Begin an unload."""
        answer: asyncio.Future[Unloaded] = asyncio.get_running_loop().create_future()
        self._fenced.setdefault(adapter, []).append(answer)
        if force:
            self.aborted += [adapter] * self.leases.pop(adapter, 0)
        self._settle()
        return answer

    def allow(self, adapter: str) -> None:
        """Take an unload back."""
        for answer in self._fenced.pop(adapter, []):
            if not answer.done():
                answer.set_result(Unloaded(0, 0, ()))

    def _settle(self) -> None:
        for adapter in [adapter for adapter in self._fenced if not self.leases[adapter]]:
            is_new = adapter not in self._gone  # else it is asked once more
            if is_new:
                self._gone.add(adapter)
                self.unloaded.append(adapter)
            for answer in self._fenced.pop(adapter):
                if not answer.done():
                    answer.set_result(Unloaded(0, 7, (3,)) if is_new else Unloaded(0, 0, ()))


class ReplicaConnection:
    """A connection to a replica."""

    def __init__(self, replica: Replica) -> None:
        self.closed = False
        self._replica = replica
        self._lost = asyncio.get_running_loop().create_future()
        replica.num_connections += 1

    async def unload(self, adapter: str, *, force: bool) -> Unloaded:
        if self._replica.is_hung:
            await self._lost
        answer = self._replica.fence(adapter, force)
        done, _ = await asyncio.wait({answer, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        return cast(Unloaded, next(iter(done)).result())

    def allow(self, adapter: str) -> None:
        self._replica.allow(adapter)

    def keep_pinned(self, adapters: dict[str, int]) -> None:
        self._replica.pinned = adapters

    async def status(self) -> Status:
        if self._replica.is_hung:
            await asyncio.shield(self._lost)
        status = EngineStatus(self._replica.address.replica, lambda: 0.0)
        idle = status.snapshot(1, None, None, {})
        stats = structs.replace(idle.scheduler, num_running=self._replica.leases.total())
        return structs.replace(idle, scheduler=stats)

    def close(self, reason: str) -> None:
        if not self.closed:
            self.closed = True
            self._lost.set_exception(Unavailable(reason))
            self._lost.exception()


def connector(*replicas: Replica) -> Any:
    """Return what connects to these replicas."""
    by_address = {replica.address: replica for replica in replicas}

    async def connect(address: SchedulerAddress, on_lost: Callable[[], None]) -> ReplicaConnection:
        replica = by_address[address]
        if replica.is_down:
            raise ConnectionRefusedError("down")
        return ReplicaConnection(replica)

    return connect
