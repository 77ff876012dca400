"""What may happen to a server's processes, by name."""

import os
import signal
from collections.abc import Callable
from random import Random

from tests.end_to_end.processes import program, title
from tests.end_to_end.server import Server

Blow = Callable[[Server, Random], None]


def pids(server: Server, *words: str) -> list[int]:
    """Return the processes whose titles hold all these words, in order of pid."""
    return sorted(pid for pid in server.processes() if all(word in title(pid) for word in words))


def ranks(server: Server) -> list[int]:
    """Return the ranks' processes."""
    return pids(server, "ray::WorkerActor")


def schedulers(server: Server) -> list[int]:
    """Return the schedulers' processes."""
    return pids(server, "ray::ServeReplica", "Scheduler")


def pools(server: Server) -> list[int]:
    """Return the adapter pool's process."""
    return pids(server, "ray::PoolActor")


def routers(server: Server) -> list[int]:
    """Return the routers' processes."""
    return pids(server, "ray::ServeReplica", "Router")


def proxies(server: Server) -> list[int]:
    """Return HAProxy's processes."""
    return sorted(pid for pid in server.processes() if program(pid) == "haproxy")


def one(find: Callable[[Server], list[int]], what: signal.Signals) -> Blow:
    """Return a blow to one process of a kind."""

    def strike(server: Server, random: Random) -> None:
        found = find(server)
        assert found, "there is nothing to strike"
        os.kill(random.choice(found), what)

    return strike


def every(find: Callable[[Server], list[int]], what: signal.Signals) -> Blow:
    """Return a blow to all processes of a kind at once."""

    def strike(server: Server, random: Random) -> None:
        for pid in find(server):
            os.kill(pid, what)

    return strike


BLOWS: dict[str, Blow] = {
    "none": lambda server, random: None,
    "kill-rank": one(ranks, signal.SIGKILL),
    "stop-rank": one(ranks, signal.SIGSTOP),
    "kill-ranks": every(ranks, signal.SIGKILL),
    "kill-scheduler": one(schedulers, signal.SIGKILL),
    "stop-scheduler": one(schedulers, signal.SIGSTOP),
    "kill-pool": one(pools, signal.SIGKILL),
    "stop-pool": one(pools, signal.SIGSTOP),
    "kill-router": one(routers, signal.SIGKILL),
    "stop-router": one(routers, signal.SIGSTOP),
    "kill-proxy": one(proxies, signal.SIGKILL),
}
