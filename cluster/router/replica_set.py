"""A router's connections to all scheduler replicas: opens them, watches them, replaces them.

Chooses among those that are up, takes streams from those that are to end, and knows for how long
one that is away is worth waiting for.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from cluster.errors import TopworkError, Unavailable
from cluster.messages import SchedulerAddress, Status
from cluster.request import Request
from cluster.router.backend import Backend
from cluster.router.config import RouterConfig
from cluster.router.engine_client import EngineClient, OnUsage
from cluster.router.load_balancer import Candidate, PrefixAffinity, choose_replica
from cluster.scheduler.stats import CacheReset

SILENT_PARTS = 7  # in which silence is measured: see `_is_silent`

Clients = Collection[EngineClient]


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica says of itself; None if it did not answer in time."""

    replica: str
    status: Status | None


class ReplicaSet:
    """Connections to all scheduler replicas; belongs to one event loop."""

    def __init__(
        self, backend: Backend, config: RouterConfig, on_usage: OnUsage | None = None
    ) -> None:
        self._backend = backend
        self._on_usage = on_usage  # of calls that no router has counted
        self._config = config
        self._clients: dict[SchedulerAddress, EngineClient] = {}
        self._listed: frozenset[SchedulerAddress] = frozenset()
        self._prefixes = PrefixAffinity(config.page_size)
        self._watchers: list[Callable[[EngineClient], None]] = []
        self._listeners: dict[Callable[[], None], None] = {}
        self._is_ready = False  # whether any replica is
        self._ready_at = -inf  # on the loop's clock: when one was ready for the last time
        self._changed = asyncio.Event()
        self._refreshing = asyncio.Lock()

    @property
    def clients(self) -> tuple[EngineClient, ...]:
        """The live connections, ordered by replica.

        A replica says itself when it leaves. One that is listed no more stays: the pool that keeps
        the list may have restarted, and lists it again in a moment.
        """
        live = (client for client in self._clients.values() if not client.closed)
        return tuple(sorted(live, key=lambda client: client.address.replica))

    def choose(self, request: Request, avoided: Clients = ()) -> EngineClient | None:
        """Return the replica that should run a request, and remember that it gets the prompt.

        One whose ranks are down is left alone while another one's are up. Without any that are up,
        one that is getting them back keeps the request meanwhile. None: there is none of these.
        """
        return self._best(request, self._able(avoided))

    def choose_any(self, request: Request) -> EngineClient:
        """Return a replica, be it one that can only say why it takes no requests.

        Raises:
            Unavailable: if none is connected.
        """
        client = self._best(request, self._able(()) or self._staying)
        if client is not None:
            return client
        raise Unavailable("no scheduler is up", retry_after=self._config.retry_after)

    @property
    def expected_until(self) -> float:
        """Until when, on the loop's clock, requests wait for a replica where there is none.

        One that was there a moment ago is being replaced: it died, or has a new configuration.
        """
        return self._ready_at + self._config.recovery_timeout

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever `choose` may return another replica than before."""
        self._listeners[listener] = None

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` no more; nothing happens if it was not to be called."""
        self._listeners.pop(listener, None)

    def watch(self, watcher: Callable[[EngineClient], None]) -> None:
        """Call `watcher` with every connection that is up and with each that is opened later."""
        self._watchers.append(watcher)
        for client in self._clients.values():
            if not client.closed:
                watcher(client)

    def unwatch(self, watcher: Callable[[EngineClient], None]) -> None:
        """Call `watcher` no more."""
        self._watchers.remove(watcher)

    async def refresh(self) -> None:
        """Look at the list of replicas; connect to new ones, let go of those that leave.

        Raises:
            Unavailable: if the list cannot be had.
        """
        async with self._refreshing:
            await self._refresh()

    async def run(self) -> None:
        """Keep the connections up until cancelled."""
        async with asyncio.TaskGroup() as watchers:
            watched: set[EngineClient] = set()
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
        """Ask all replicas that are listed or connected how they are, in order of replica."""
        asking = (self._report(name, client) for name, client in self._by_replica().items())
        return tuple(await asyncio.gather(*asking))

    async def reset_prefix_caches(self) -> dict[str, CacheReset]:
        """Reset the prefix cache of every replica that is listed or connected; return what went.

        Raises:
            Unavailable: if one did not answer in time; the others have done it.
        """
        by_replica = self._by_replica()
        results = await asyncio.gather(*(self._reset(one) for one in by_replica.values()))
        resets = {}
        for replica, result in zip(by_replica, results, strict=True):
            if result is None:
                raise Unavailable(
                    f"scheduler {replica} does not answer; what the others had cached is reset",
                    retry_after=self._config.retry_after,
                )
            resets[replica] = result
        return resets

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close("the router shuts down")
        await asyncio.gather(*(client.wait_closed() for client in self._clients.values()))
        self._clients.clear()
        self._listed = frozenset()

    def _by_replica(self) -> dict[str, EngineClient | None]:
        """Return the connections to all replicas that are listed or connected, in their order."""
        connected = {client.address.replica: client for client in self.clients}
        listed = {address.replica for address in self._listed}
        return {name: connected.get(name) for name in sorted(listed | connected.keys())}

    @property
    def _staying(self) -> list[EngineClient]:
        return [client for client in self.clients if not client.is_leaving]

    def _able(self, avoided: Clients) -> list[EngineClient]:
        """Return the replicas that take requests: those that run them, or else keep them."""
        clients = [client for client in self._staying if client not in avoided]
        ready = [client for client in clients if client.is_ready]
        return ready or [client for client in clients if client.is_recovering]

    def _best(self, request: Request, clients: Sequence[EngineClient]) -> EngineClient | None:
        if not clients:
            return None
        chain = self._prefixes.chain(request)
        matched = self._prefixes.matched(chain)
        candidates = [
            Candidate(
                replica=client.address.replica,
                load=client.load,
                cached_pages=matched.get(client.address.replica, 0),
                is_resident=client.holds(request.adapter),
            )
            for client in clients
        ]
        chosen = clients[candidates.index(choose_replica(request.adapter, candidates))]
        self._prefixes.note(chain, chosen.address.replica)
        return chosen

    def _on_change(self) -> None:
        """Take in that a connection is up, has ended or says something else than before."""
        self._changed.set()
        if self._is_ready:
            self._ready_at = asyncio.get_running_loop().time()
        self._is_ready = any(client.is_ready for client in self._staying)
        if self._is_ready:
            for client in self.clients:
                if client.is_leaving:
                    client.hand_over()
        for listener in tuple(self._listeners):
            listener()

    async def _refresh(self) -> None:
        """See `refresh`; a pool that is away has the list that it had."""
        error: TopworkError | None = None
        try:
            async with asyncio.timeout(self._config.scheduler_timeout):
                attached = await self._backend.schedulers()
            self._listed = frozenset(attached.addresses)
            if attached.seconds_since_left is not None:  # it was ready, to a router before this one
                left_at = asyncio.get_running_loop().time() - attached.seconds_since_left
                self._ready_at = max(self._ready_at, left_at)
        except TimeoutError:
            error = Unavailable("the adapter pool does not answer", retry_after=1)
        except TopworkError as caught:
            error = caught
        for address, client in list(self._clients.items()):
            if client.closed or (client.is_leaving and not client.num_in_flight):
                client.close("it leaves")
                del self._clients[address]
                self._prefixes.forget(address.replica)
        missing = sorted(self._listed - self._clients.keys(), key=lambda one: one.replica)
        await asyncio.gather(*(self._connect(address) for address in missing))
        if error is not None:
            raise error

    async def _connect(self, address: SchedulerAddress) -> None:
        """Connect to a replica and hear how it is; a stopped one accepts, but says nothing."""
        client: EngineClient | None = None
        try:
            async with asyncio.timeout(self._config.health_timeout):
                client = await EngineClient.connect(address, self._on_change, self._on_usage)
                await client.status()
                self._clients[address] = client
        except (OSError, TimeoutError, Unavailable):
            return  # not up yet, or down: the next look tries again
        finally:
            if client is not None and address not in self._clients:
                client.close("it does not answer")
        for watcher in tuple(self._watchers):
            watcher(client)
        self._on_change()

    async def _watch(self, client: EngineClient) -> None:
        """Ask for a sign of life at intervals; a process that is stopped keeps its sockets open."""
        while not client.closed:
            if await self._is_silent(client):
                client.close(f"silent for {self._config.scheduler_timeout:g} s", is_hung=True)
            interval = self._config.refresh_interval
            await asyncio.sleep(interval if client.is_ready else interval / 10)

    async def _is_silent(self, client: EngineClient) -> bool:
        """Ask a scheduler how it is; return whether nothing at all is heard of it for too long.

        The time is measured in parts. If it is this process that stands still, only one part of
        that counts, after which what has come meanwhile is read.
        """
        part = self._config.scheduler_timeout / SILENT_PARTS
        asking = asyncio.create_task(client.status())
        try:
            silent_parts = 0
            while silent_parts < SILENT_PARTS:
                num_frames = client.num_frames
                await asyncio.wait((asking,), timeout=part)
                if asking.done():
                    return False
                silent_parts = silent_parts + 1 if client.num_frames == num_frames else 0
            return True
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        interval = self._config.refresh_interval
        if not self._clients:  # nothing can be served: look closely
            interval /= 10
        try:
            async with asyncio.timeout(interval):
                await self._changed.wait()
        except TimeoutError:
            return
        await asyncio.sleep(self._config.refresh_interval / 10)  # not a tight loop of reconnects

    async def _report(self, replica: str, client: EngineClient | None) -> Report:
        if client is None:
            return Report(replica, None)
        try:
            async with asyncio.timeout(self._config.health_timeout):
                return Report(replica, await client.status())
        except (TimeoutError, Unavailable):
            return Report(replica, None)

    async def _reset(self, client: EngineClient | None) -> CacheReset | None:
        """Reset the cache of one replica; None if it does not answer."""
        if client is None:
            return None
        try:
            async with asyncio.timeout(self._config.health_timeout):
                return await client.reset_prefix_cache()
        except (TimeoutError, Unavailable):
            return None
