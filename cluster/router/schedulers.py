"""The scheduler replicas that a router knows, and which of them gets a request.

Owns the connections: opens them, watches them, replaces them. An adapter goes to the same replica
as long as that one is not much busier than the others, so that its weights and its prefix cache
are used again. Knows nothing of HTTP or of text.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b

from cluster.errors import TopworkError, Unavailable
from cluster.router.backend import Backend
from cluster.router.config import RouterConfig
from cluster.router.scheduler_client import SchedulerClient
from cluster.wire import SchedulerAddress, Status

LOAD_FACTOR = 1.25  # a replica may have this much of the average load before it is passed over


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica says of itself; None if it did not answer in time."""

    replica: str
    status: Status | None


def affinity(adapter: str, replica: str) -> bytes:
    """Return the weight by which replicas are ranked for an adapter; equal on every router."""
    key = f"{len(adapter)}:{adapter}{replica}".encode()
    return blake2b(key, digest_size=8).digest()


class Schedulers:
    """Connections to all scheduler replicas; belongs to one event loop."""

    def __init__(self, backend: Backend, config: RouterConfig) -> None:
        self._backend = backend
        self._config = config
        self._clients: dict[SchedulerAddress, SchedulerClient] = {}
        self._listed: frozenset[SchedulerAddress] = frozenset()
        self._watchers: list[Callable[[SchedulerClient], None]] = []
        self._changed = asyncio.Event()
        self._refreshing = asyncio.Lock()

    @property
    def clients(self) -> tuple[SchedulerClient, ...]:
        """The live connections to listed replicas, ordered by replica."""
        live = (
            client
            for address, client in self._clients.items()
            if address in self._listed and not client.closed
        )
        return tuple(sorted(live, key=lambda client: client.address.replica))

    def choose(self, adapter: str) -> SchedulerClient:
        """Return the replica that should run a request of this adapter.

        Raises:
            Unavailable: if none is connected.
        """
        clients = self.clients
        if not clients:
            raise Unavailable("no scheduler is up", retry_after=self._config.retry_after)
        total = sum(client.num_in_flight for client in clients) + 1
        bound = LOAD_FACTOR * total / len(clients)
        # The least loaded one is always under the bound, so that there is a choice.
        free = [client for client in clients if client.num_in_flight < bound]
        return max(free, key=lambda client: affinity(adapter, client.address.replica))

    def watch(self, watcher: Callable[[SchedulerClient], None]) -> None:
        """Call `watcher` with every connection that is up and with each that is opened later."""
        self._watchers.append(watcher)
        for client in self._clients.values():
            if not client.closed:
                watcher(client)

    def unwatch(self, watcher: Callable[[SchedulerClient], None]) -> None:
        """Call `watcher` no more."""
        self._watchers.remove(watcher)

    async def refresh(self) -> None:
        """Look at the list of replicas; connect to new ones, let go of those that left.

        Raises:
            Unavailable: if the list cannot be had.
        """
        async with self._refreshing:
            await self._refresh()

    async def run(self) -> None:
        """Keep the connections up until cancelled."""
        async with asyncio.TaskGroup() as watchers:
            watched: set[SchedulerClient] = set()
            while True:
                with suppress(TopworkError):  # the pool is away; the connections stay good
                    await self.refresh()
                watched = {client for client in watched if not client.closed}
                for client in self._clients.values():
                    if client not in watched:
                        watched.add(client)
                        watchers.create_task(self._watch(client))
                await self._wait_for_change()

    async def reports(self) -> tuple[Report, ...]:
        """Ask all listed replicas how they are, in order of replica."""
        by_replica = {client.address.replica: client for client in self.clients}
        replicas = sorted(address.replica for address in self._listed)
        return tuple(
            await asyncio.gather(*(self._report(name, by_replica.get(name)) for name in replicas))
        )

    async def close(self) -> None:
        """Close all connections."""
        clients = list(self._clients.values())
        for client in clients:
            client.close("the router shuts down")
        await asyncio.gather(*(client.wait_closed() for client in clients))
        self._clients.clear()
        self._listed = frozenset()

    async def _refresh(self) -> None:
        listed = frozenset(await self._backend.schedulers())
        self._listed = listed
        for address, client in list(self._clients.items()):
            if client.closed or (address not in listed and not client.num_in_flight):
                client.close("it is not listed any more")
                del self._clients[address]
        missing = sorted(listed - self._clients.keys(), key=lambda address: address.replica)
        await asyncio.gather(*(self._connect(address) for address in missing))

    async def _connect(self, address: SchedulerAddress) -> None:
        try:
            async with asyncio.timeout(self._config.health_timeout):
                client = await SchedulerClient.connect(address, self._changed.set)
        except (OSError, TimeoutError):
            return  # not up yet, or down: the next look tries again
        self._clients[address] = client
        for watcher in tuple(self._watchers):
            watcher(client)

    async def _watch(self, client: SchedulerClient) -> None:
        """Ask for a sign of life at intervals; a process that is stopped keeps its sockets open."""
        while not client.closed:
            try:
                async with asyncio.timeout(self._config.scheduler_timeout):
                    await client.status()
            except TimeoutError:
                client.close(f"silent for {self._config.scheduler_timeout:g} s")
            except Unavailable:
                return
            await asyncio.sleep(self._config.refresh_interval)

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(self._config.refresh_interval):
                await self._changed.wait()
        except TimeoutError:
            return
        await asyncio.sleep(self._config.refresh_interval / 10)  # not a tight loop of reconnects

    async def _report(self, replica: str, client: SchedulerClient | None) -> Report:
        if client is None:
            return Report(replica, None)
        try:
            async with asyncio.timeout(self._config.health_timeout):
                return Report(replica, await client.status())
        except (TimeoutError, Unavailable):
            return Report(replica, None)
