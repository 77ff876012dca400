"""What may happen to a server's processes, by name."""

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

from deploy.serving.haproxy import admin
from tests.end_to_end.processes import program, title
from tests.end_to_end.server import Server

Blow = Callable[[Server, Random], list[int]]  # returns the processes that must not live on


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


def haproxy_directory(server: Server) -> Path:
    """Return the directory of a server's HAProxy, while one runs."""
    found = [re.search(r"(\S+)/[^/\s]+/haproxy\.cfg", title(pid)) for pid in proxies(server)]
    directories = {match[1] for match in found if match is not None}
    assert len(directories) == 1, f"which HAProxy? {directories}"
    return Path(directories.pop())


def num_routers_in_use(directory: Path) -> int:
    """Return how many routers HAProxy passes calls to.

    Raises:
        OSError: if HAProxy does not answer.
    """
    rows = admin.statistics(directory)
    return sum("Router" in row["svname"] and row["status"] == "UP" for row in rows)


def one(find: Callable[[Server], list[int]], what: signal.Signals) -> Blow:
    """Return a blow to one process of a kind."""

    def strike(server: Server, random: Random) -> list[int]:
        found = find(server)
        assert found, "there is nothing to strike"
        pid = random.choice(found)
        os.kill(pid, what)
        return [pid]

    return strike


def halt(find: Callable[[Server], list[int]], longest: float) -> Blow:
    """Return a blow that lets one process of a kind stand still for so many seconds at most."""

    def strike(server: Server, random: Random) -> list[int]:
        found = find(server)
        assert found, "there is nothing to strike"
        pid = random.choice(found)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(random.uniform(0.05, longest))
        with suppress(ProcessLookupError):  # it was taken for hung
            os.kill(pid, signal.SIGCONT)
        return []

    return strike


def every(find: Callable[[Server], list[int]], what: signal.Signals) -> Blow:
    """Return a blow to all processes of a kind at once."""

    def strike(server: Server, random: Random) -> list[int]:
        found = find(server)
        for pid in found:
            os.kill(pid, what)
        return found

    return strike


BLOWS: dict[str, Blow] = {
    "none": lambda server, random: [],
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
    "halt-rank": halt(ranks, 3.0),
    "halt-scheduler": halt(schedulers, 5.0),
    "halt-pool": halt(pools, 5.0),
    "halt-router": halt(routers, 5.0),
}
# After these the ranks go on: whoever calls is to notice nothing.
AT_FRONT_DOOR = {"kill-router", "stop-router", "kill-proxy", "halt-router"}
