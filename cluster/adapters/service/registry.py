"""The scheduler replicas of a cluster, and the adapter pool's connection to each of them.

All orders about one adapter go over one connection, so that a replica gets them in the order in
which they were given.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from cluster.adapters.records import FreedSlot
from cluster.errors import Unavailable
from cluster.messages import SchedulerAddress, Status, Unloaded

logger = logging.getLogger("topwork.pool")

BUSY_TIMEOUT = 0.05  # seconds for an answer that changes little


class Connection(Protocol):
    """A connection to one scheduler; every coroutine raises Unavailable when it is lost."""

    closed: bool

    async def unload(self, adapter: str, *, force: bool) -> Unloaded:
        """Make the scheduler forget an adapter; wait until it has."""
        ...

    def allow(self, adapter: str) -> None:
        """Take an unload back that is not complete."""
        ...

    def keep_pinned(self, adapters: dict[str, int]) -> None:
        """Make the scheduler keep exactly these adapters in their slots."""
        ...

    async def status(self) -> Status:
        """Wait for a sign of life."""
        ...

    def close(self, reason: str) -> None:
        """Close the connection."""
        ...


Connect = Callable[[SchedulerAddress, Callable[[], None]], Awaitable[Connection]]


@dataclass(slots=True)
class UnloadTotals:
    """What schedulers held of an adapter that they have forgotten."""

    pages: int = 0
    slots: list[FreedSlot] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)  # replicas that did not answer

    def add(self, other: "UnloadTotals") -> None:
        """Count what another round has freed."""
        self.pages += other.pages
        self.slots += other.slots
        self.lost |= other.lost


class SchedulerRegistry:
    """One connection to each attached replica, opened again when it is needed and was lost.

    `pinned` returns the adapters that must keep their slots, with the bytes that each claims, and
    `allowed` those that a pool before this one may have had unloaded, and that are wanted again.
    """

    def __init__(
        self,
        connect: Connect,
        silence: float,
        pinned: Callable[[], dict[str, int]] = dict,
        allowed: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self._connect = connect
        self._pinned = pinned
        self._allowed = allowed
        self._silence = silence  # seconds without a sign of life until a replica is given up
        self._addresses: dict[str, SchedulerAddress] = {}
        self._connections: dict[SchedulerAddress, Connection] = {}
        self._reconnecting: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def addresses(self) -> tuple[SchedulerAddress, ...]:
        """All attached replicas in order of their names."""
        return tuple(self._addresses[name] for name in sorted(self._addresses))

    async def attach(self, address: SchedulerAddress) -> None:
        """Take a replica in; the latest address of a replica counts.

        A replica says so again at intervals, so that a pool that has restarted learns of it.
        """
        if self._addresses.get(address.replica) == address:
            return
        await self.detach(address.replica)
        self._addresses[address.replica] = address
        await self._reach(address)

    async def detach(self, replica: str) -> None:
        """Let go of a replica that has ended."""
        address = self._addresses.pop(replica, None)
        connection = self._connections.pop(address, None) if address is not None else None
        if connection is not None:
            connection.close("the replica has ended")

    async def unload(
        self, adapter: str, is_wanted: Callable[[], bool], *, force: bool
    ) -> UnloadTotals:
        """Make all replicas forget an adapter, unless that is not wanted any more.

        A replica that is lost meanwhile is none to wait for: its process took the adapter along,
        or it lives on and drops the content, which no request can reach, as its least recent.
        """
        totals = UnloadTotals()
        await asyncio.gather(
            *(self._unload(one, adapter, is_wanted, force, totals) for one in self.addresses)
        )
        totals.slots.sort(key=lambda slot: slot.replica)
        return totals

    def allow(self, adapter: str) -> None:
        """Let requests for an adapter in again whose unload is under way."""
        for connection in self._open_connections():
            connection.allow(adapter)

    def send_pins(self) -> None:
        """Make all replicas keep exactly what is pinned now; later ones get it as they attach."""
        for connection in self._open_connections():
            connection.keep_pinned(self._pinned())

    async def is_busy(self) -> bool:
        """Tell whether sequences run on any replica; one that does not answer at once is busy."""
        asking = [asyncio.create_task(_num_running(one)) for one in self._open_connections()]
        if not asking:
            return False
        _, late = await asyncio.wait(asking, timeout=BUSY_TIMEOUT)
        for task in late:
            task.cancel()
        return bool(late) or any(task.result() for task in asking)

    def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        for task in tuple(self._reconnecting):
            task.cancel()
        for connection in self._open_connections():
            connection.close("the pool shuts down")

    def _open_connections(self) -> tuple[Connection, ...]:
        return tuple(one for one in self._connections.values() if not one.closed)

    async def _reach(self, address: SchedulerAddress) -> Connection | None:
        """Return an open connection, or None if the replica cannot be reached."""
        connection = self._connections.get(address)
        if connection is not None and not connection.closed:
            return connection
        try:
            async with asyncio.timeout(self._silence):
                connection = await self._connect(address, lambda: self._on_lost(address))
        except (OSError, TimeoutError) as error:
            logger.warning("scheduler %s cannot be reached: %s", address.replica, error)
            return None
        other = self._connections.get(address)
        if other is not None and not other.closed:  # opened by another call meanwhile
            connection.close("there is one already")
            return other
        self._connections[address] = connection
        # All that is wanted, nothing too: it may hold what an earlier pool wanted.
        connection.keep_pinned(self._pinned())
        for adapter in self._allowed():
            connection.allow(adapter)
        return connection

    def _on_lost(self, address: SchedulerAddress) -> None:
        """Connect again, and forget a replica that cannot be reached: it has died.

        One that lives attaches again by itself.
        """
        if self._addresses.get(address.replica) == address and not self._is_closed:
            task = asyncio.create_task(self._reconnect(address))
            self._reconnecting.add(task)
            task.add_done_callback(self._reconnecting.discard)

    async def _reconnect(self, address: SchedulerAddress) -> None:
        if await self._reach(address) is None and self._addresses.get(address.replica) == address:
            await self.detach(address.replica)

    async def _unload(
        self,
        address: SchedulerAddress,
        adapter: str,
        is_wanted: Callable[[], bool],
        force: bool,
        totals: UnloadTotals,
    ) -> None:
        connection = await self._reach(address)
        if connection is None:
            totals.lost.add(address.replica)
            return

        async def ask() -> Unloaded | None:
            # No await between the question and the order: an `allow` in between would be late.
            return await connection.unload(adapter, force=force) if is_wanted() else None

        asking = asyncio.create_task(ask())
        try:
            while not (await asyncio.wait({asking}, timeout=self._silence))[0]:
                if not await self._is_responding(connection):
                    connection.close(f"silent for {self._silence:g} s")
            answer = asking.result()
        except Unavailable:
            totals.lost.add(address.replica)
            return
        finally:
            asking.cancel()
        if answer is not None:
            totals.pages += answer.freed_pages
            totals.slots += [FreedSlot(address.replica, slot) for slot in answer.freed_slots]

    async def _is_responding(self, connection: Connection) -> bool:
        try:
            async with asyncio.timeout(self._silence):
                await connection.status()
        except (TimeoutError, Unavailable):
            return False
        return True


async def _num_running(connection: Connection) -> int:
    try:
        return (await connection.status()).scheduler.num_running
    except Unavailable:
        return 0
