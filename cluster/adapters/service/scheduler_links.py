"""The adapter pool's connections to scheduler replicas, and the orders that go over them.

All orders about one adapter go over one connection, so that a replica hears them in the order in
which they were given. Knows nothing of names or versions.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from cluster.adapters.records import FreedSlot
from cluster.errors import Unavailable
from cluster.messages import SchedulerAddress, Status, Unloaded

logger = logging.getLogger("topwork.pool")


class Line(Protocol):
    """A connection to one scheduler; every coroutine may raise Unavailable when it is lost."""

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


PATIENCE = 0.05  # seconds for an answer that changes little

Connect = Callable[[SchedulerAddress, Callable[[], None]], Awaitable[Line]]


@dataclass(slots=True)
class Gone:
    """What schedulers held of an adapter that they have forgotten."""

    pages: int = 0
    slots: list[FreedSlot] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)  # replicas that did not answer

    def add(self, other: "Gone") -> None:
        """Count what another round has found."""
        self.pages += other.pages
        self.slots += other.slots
        self.lost |= other.lost


class SchedulerLinks:
    """One line to each attached replica, opened again when it is needed and was lost."""

    def __init__(self, connect: Connect, silence: float) -> None:
        self._connect = connect
        self._silence = silence  # seconds without a sign of life until a replica is given up
        self._addresses: dict[str, SchedulerAddress] = {}
        self._lines: dict[SchedulerAddress, Line] = {}
        self._pinned: dict[str, int] = {}  # bytes that each claims on a rank
        self._trying: set[asyncio.Task[None]] = set()  # to reach replicas whose line was lost
        self._is_closed = False

    @property
    def addresses(self) -> tuple[SchedulerAddress, ...]:
        """All attached replicas in order of their names."""
        return tuple(self._addresses[name] for name in sorted(self._addresses))

    async def attach(self, address: SchedulerAddress) -> None:
        """Take a replica in; the latest address of a replica counts.

        A replica says so again at intervals, so that a pool that has restarted hears of it.
        """
        if self._addresses.get(address.replica) == address:
            return
        await self.detach(address.replica)
        self._addresses[address.replica] = address
        await self._reach(address)

    async def detach(self, replica: str) -> None:
        """Let go of a replica that has ended."""
        address = self._addresses.pop(replica, None)
        line = self._lines.pop(address, None) if address is not None else None
        if line is not None:
            line.close("the replica has ended")

    async def unload(self, adapter: str, is_wanted: Callable[[], bool], *, force: bool) -> Gone:
        """Make all replicas forget an adapter, unless that is not wanted any more.

        A replica that is lost meanwhile is none to wait for: its process took the adapter along,
        or it lives on and drops the content, which no request can reach, as its least recent.
        """
        gone = Gone()
        await asyncio.gather(
            *(self._unload(one, adapter, is_wanted, force, gone) for one in self.addresses)
        )
        gone.slots.sort(key=lambda slot: slot.replica)
        return gone

    def allow(self, adapter: str) -> None:
        """Let requests for an adapter in again whose unload is under way."""
        for line in self._open_lines():
            line.allow(adapter)

    def keep_pinned(self, adapters: dict[str, int]) -> None:
        """Make all replicas, later ones too, keep exactly these adapters in their slots."""
        if adapters != self._pinned:
            self._pinned = adapters
            for line in self._open_lines():
                line.keep_pinned(adapters)

    async def is_busy(self) -> bool:
        """Tell whether sequences run on any replica; one that does not answer at once is busy."""
        asking = [asyncio.create_task(_num_running(line)) for line in self._open_lines()]
        if not asking:
            return False
        _, late = await asyncio.wait(asking, timeout=PATIENCE)
        for task in late:
            task.cancel()
        return bool(late) or any(task.result() for task in asking)

    def close(self) -> None:
        """Close all lines."""
        self._is_closed = True
        for trying in tuple(self._trying):
            trying.cancel()
        for line in self._open_lines():
            line.close("the pool shuts down")

    def _open_lines(self) -> tuple[Line, ...]:
        return tuple(line for line in self._lines.values() if not line.closed)

    async def _reach(self, address: SchedulerAddress) -> Line | None:
        """Return an open line, or None if the replica cannot be reached."""
        line = self._lines.get(address)
        if line is not None and not line.closed:
            return line
        try:
            async with asyncio.timeout(self._silence):
                line = await self._connect(address, lambda: self._lost(address))
        except (OSError, TimeoutError) as error:
            logger.warning("scheduler %s cannot be reached: %s", address.replica, error)
            return None
        other = self._lines.get(address)
        if other is not None and not other.closed:  # opened by somebody else meanwhile
            line.close("there is one already")
            return other
        self._lines[address] = line
        if self._pinned:
            line.keep_pinned(self._pinned)
        return line

    def _lost(self, address: SchedulerAddress) -> None:
        """Try a lost line again, and forget a replica that cannot be reached: it has died.

        One that lives attaches again by itself.
        """
        if self._addresses.get(address.replica) == address and not self._is_closed:
            trying = asyncio.create_task(self._try_again(address))
            self._trying.add(trying)
            trying.add_done_callback(self._trying.discard)

    async def _try_again(self, address: SchedulerAddress) -> None:
        if await self._reach(address) is None and self._addresses.get(address.replica) == address:
            await self.detach(address.replica)

    async def _unload(
        self,
        address: SchedulerAddress,
        adapter: str,
        is_wanted: Callable[[], bool],
        force: bool,
        gone: Gone,
    ) -> None:
        line = await self._reach(address)
        if line is None:
            gone.lost.add(address.replica)
            return

        async def ask() -> Unloaded | None:
            # No await between the question and the order: an `allow` in between would be late.
            return await line.unload(adapter, force=force) if is_wanted() else None

        asking = asyncio.create_task(ask())
        try:
            while not (await asyncio.wait({asking}, timeout=self._silence))[0]:
                if not await self._lives(line):
                    line.close(f"silent for {self._silence:g} s")
            answer = asking.result()
        except Unavailable:
            gone.lost.add(address.replica)
            return
        finally:
            asking.cancel()
        if answer is not None:
            gone.pages += answer.freed_pages
            gone.slots += [FreedSlot(address.replica, slot) for slot in answer.freed_slots]

    async def _lives(self, line: Line) -> bool:
        try:
            async with asyncio.timeout(self._silence):
                await line.status()
        except (TimeoutError, Unavailable):
            return False
        return True


async def _num_running(line: Line) -> int:
    try:
        return (await line.status()).num_running
    except Unavailable:
        return 0
