"""Time to first token on an idle server, by where the adapter is when it is asked for.

Owns the ways of bringing adapters to each place; whether they are there is asked of the server
before each sample.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median

import httpx

from deploy.bench.http_target import BenchError, token_times
from deploy.bench.workload import Workload
from tests.bench.adapters.directories import drop_from_page_cache
from tests.bench.adapters.server import BenchServer
from tests.bench.light_http import light_client

DEVICE, HOST, DISK, NEVER_READ = "device", "host", "disk", "never read"
TIERS = (DEVICE, HOST, DISK, NEVER_READ)
PUSH = 32  # adapters asked for at a time to drive others out
CLIENTS = 8  # that ask for these


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdOptions:
    """How much is measured."""

    names: tuple[str, ...]  # of the adapters that are served, none touched yet
    directory: Path  # of these adapters
    vocab_size: int
    samples: int  # for each place
    num_slots: int
    input_len: int = 32
    drop_page_cache: bool = True  # of adapters that were never read


@dataclass(slots=True)
class Place:
    """Times to first token of adapters that are in one place, in seconds."""

    tier: str
    times: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The middle one."""
        return median(self.times)


class ColdBench:
    """Measures one server, on which nothing else happens."""

    def __init__(
        self, server: BenchServer, options: ColdOptions, told: Callable[[str], None]
    ) -> None:
        self._server = server
        self._options = options
        self._told = told
        self._untouched = iter(options.names)
        self._num_asked = 0

    def run(self) -> list[Place]:
        """Return the samples of every place, taken in turns.

        Raises:
            BenchError: if an adapter is not where it should be.
        """
        return asyncio.run(self._run())

    async def _run(self) -> list[Place]:
        options, places = self._options, [Place(tier) for tier in TIERS]
        async with light_client(self._server.url) as client:
            by_tier = await self._bring_to_places(client)
            for number in range(options.samples + 1):
                self._told(f"cold, {'warm-up' if number == 0 else f'sample {number}'}")
                for place in places:
                    seconds = await self._sample(client, place.tier, next(by_tier[place.tier]))
                    if number > 0:
                        place.times.append(seconds)
        return places

    async def _bring_to_places(self, client: httpx.AsyncClient) -> dict[str, Iterator[str]]:
        """Return adapters by where they are now, or will be once `_sample` asks for them."""
        count = self._options.samples + 1
        on_disk = self._take(count)
        await self._ask_all(client, on_disk)
        self._told("cold: driving adapters out of host memory")
        while any(self._server.adapter(name)["tier"] != DISK for name in on_disk):
            await self._ask_all(client, self._take(PUSH))
        in_host = self._take(count)
        await self._ask_all(client, in_host)
        last = self._take(2 * self._options.num_slots)
        await self._ask_all(client, last)
        return {
            DEVICE: iter([last[-1]] * count),
            HOST: iter(in_host),
            DISK: iter(on_disk),
            NEVER_READ: iter(self._take(count)),
        }

    async def _sample(self, client: httpx.AsyncClient, tier: str, name: str) -> float:
        if tier == DEVICE:
            await self._ask(client, name)
        found = self._server.adapter(name)
        wanted = DISK if tier == NEVER_READ else tier
        if found["tier"] != wanted or (found["digest"] is None) != (tier == NEVER_READ):
            place = f"{found['tier']}, digest {found['digest']}"
            raise BenchError(f"{name} should be at {tier!r}, but is at {place}")
        if tier == NEVER_READ and self._options.drop_page_cache:
            drop_from_page_cache(self._options.directory / name)
        return await self._ask(client, name)

    async def _ask_all(self, client: httpx.AsyncClient, names: list[str]) -> None:
        waiting = iter(names)

        async def one_client() -> None:
            for name in waiting:
                await self._ask(client, name)

        await asyncio.gather(*(one_client() for _ in range(CLIENTS)))

    async def _ask(self, client: httpx.AsyncClient, name: str) -> float:
        """Return the seconds to the one token of a prompt that nobody has sent before."""
        self._num_asked += 1
        options = self._options
        (ask,) = Workload(
            name="cold",
            models=(name,),
            concurrency=1,
            num_requests=1,
            input_len=options.input_len,
            output_len=1,
            vocab_size=options.vocab_size,
        ).asks(self._num_asked)
        sent = time.perf_counter()
        async with aclosing(token_times(client, ask)) as tokens:
            times = [at async for at in tokens]
        if not times:
            raise BenchError("the server sent no token")
        return times[0] - sent

    def _take(self, count: int) -> list[str]:
        names = list(islice(self._untouched, count))
        if len(names) < count:
            raise BenchError("no untouched adapters are left: fewer samples, or more adapters")
        return names
