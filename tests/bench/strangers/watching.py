"""The streams and the memory of a server while something is done to it."""

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path

import httpx

from deploy.bench.http_target import token_times
from deploy.bench.workload import Ask, percentile
from tests.bench.adapters.streams import Window, gaps_within
from tests.bench.light_http import light_client
from tests.bench.process_tree import ProcessTree

SAMPLE_SECONDS = 0.25  # a look at all processes takes some milliseconds
ROUTER, POOL = "Router", "Pool"  # in the names that Ray gives to processes


def resident_bytes(pid: int) -> int:
    """Return how much memory a process holds, 0 if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


def command_of(pid: int) -> str:
    """Return the command line of a process, nothing if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


class Memory:
    """What the routers and the pool of a server hold, and the processes that read for them."""

    def __init__(self, pid: int) -> None:
        tree = ProcessTree(pid)
        self._tree = tree
        commands = {one: command_of(one) for one in tree.pids()}
        replicas = {one: told for one, told in commands.items() if "ServeReplica" in told}
        self.routers = [one for one, told in replicas.items() if ROUTER in told]
        self.pool = [one for one, told in commands.items() if POOL in told and "::" in told]
        assert self.routers and self.pool, commands
        self.most: dict[str, int] = {}

    def now(self) -> dict[str, int]:
        """Return the bytes that each part holds."""
        readers = [
            pid for pid in self._tree.pids() if "cluster.router.bodies.process" in command_of(pid)
        ]
        parts = {"routers": self.routers, "their readers": readers, "pool": self.pool}
        return {part: sum(map(resident_bytes, pids)) for part, pids in parts.items()}

    def look(self) -> None:
        """Note what is held now, if it is the most."""
        for part, held in self.now().items():
            self.most[part] = max(held, self.most.get(part, 0))

    async def follow(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(SAMPLE_SECONDS)


class Watch:
    """Streams that run all the time."""

    def __init__(self, url: str, model: str, num_streams: int, num_tokens: int) -> None:
        self._url = url
        self._asks = [
            Ask(model, tuple(range(100 + 40 * number, 132 + 40 * number)), num_tokens)
            for number in range(num_streams)
        ]
        self._times: list[list[float]] = []
        self.num_broken = 0

    async def run(self) -> None:
        """Read streams, each followed by the next, until cancelled."""
        async with light_client(self._url) as client:
            await asyncio.gather(*(self._read(client, ask) for ask in self._asks))

    async def _read(self, client: httpx.AsyncClient, ask: Ask) -> None:
        while True:
            times: list[float] = []
            self._times.append(times)
            async for at in token_times(client, ask):
                times.append(at)

    async def during(self, work: Awaitable[object]) -> list[float]:
        """Return the gaps between tokens that had a moment in common with some work."""
        start = time.perf_counter()
        await work
        window = Window(start, time.perf_counter())
        await asyncio.sleep(1.0)  # until a gap that has begun has ended
        return [gap for times in self._times for gap in gaps_within(times, window)]

    def forget(self) -> None:
        """Leave out what came so far, but for the last token of each stream."""
        for times in self._times:
            del times[:-1]


def told(gaps: list[float]) -> tuple[float, float, float]:
    """Return the median, the 99th percentile and the longest, in milliseconds."""
    return 1e3 * percentile(gaps, 50), 1e3 * percentile(gaps, 99), 1e3 * max(gaps)
