"""The phases in which the small tenant is measured: alone, and beside the large one.

The small tenant asks one thing after the other, with a pause between two, so that its prompts come
at any moment of a step. Phases take turns within each round: what the machine does besides shows as
a spread between rounds.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle
from random import Random

import httpx

from deploy.bench.http_target import token_times
from deploy.bench.workload import Workload, percentile
from tests.bench.adapters.directories import adapter_names
from tests.bench.adapters.server import BASE
from tests.bench.light_http import light_client
from tests.bench.tenants.backlog import Backlog, asking
from tests.bench.tenants.serving import (
    LARGE,
    NUM_ADAPTERS,
    SMALL,
    read_metrics,
    until_full,
)

ALONE, WARM, COLD, FULL = "alone", "beside warm", "beside cold loads", "all seats and pages taken"
LONG_ANSWER = 2000  # tokens
NUM_WARM = 4  # adapters
TAKEN_WITHIN = 180.0  # seconds
SETTLE = 3.0  # seconds from the first requests of a phase to its first sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How much is measured; lengths in tokens, times in seconds."""

    url: str
    num_seats: int
    vocab_size: int
    phases: tuple[str, ...]
    rounds: int
    samples: int  # in each phase of a round
    interval: float  # between two requests of the small tenant, from start to start
    small_input: int
    small_output: int
    large_input: int
    large_output: int


@dataclass(slots=True)
class Phase:
    """One kind of phase over all rounds; times in seconds."""

    name: str
    first_tokens: list[list[float]] = field(default_factory=list)  # by round
    large_rates: list[float] = field(default_factory=list)  # tokens a second, by round

    def first_token(self, percent: float) -> float:
        """Return a percentile of the time to first token over all rounds."""
        return percentile([one for round_ in self.first_tokens for one in round_], percent)


class PhaseBench:
    """Measures one server."""

    def __init__(self, options: Options, told: Callable[[str], None]) -> None:
        self._options = options
        self._told = told
        self._cold = cycle(adapter_names(NUM_ADAPTERS)[NUM_WARM:])
        self._num_asked = 0

    async def run(self) -> list[Phase]:
        """Measure all phases in every round, after one that does not count."""
        phases = [Phase(name) for name in self._options.phases]
        headers = {"Authorization": f"Bearer {SMALL}"}
        async with light_client(self._options.url, headers) as client:
            for number in range(self._options.rounds + 1):
                for phase in phases:
                    title = f"round {number}" if number else "warm-up"
                    self._told(f"{title}: {phase.name}")
                    await self._measure(client, phase, number)
        return phases

    async def _measure(self, client: httpx.AsyncClient, phase: Phase, number: int) -> None:
        options = self._options
        async with self._beside(phase.name, number):
            before, began = (await read_metrics(options.url)).generated("large"), time.monotonic()
            times = await self._first_tokens(client, options.samples if number else 2)
            elapsed = time.monotonic() - began
            after = (await read_metrics(options.url)).generated("large")
        if number:
            phase.first_tokens.append(times)
            phase.large_rates.append((after - before) / elapsed)

    def _beside(self, name: str, number: int) -> AbstractAsyncContextManager[None]:
        if name == ALONE:
            return nullcontext()
        return self._crowd(name, number)

    @asynccontextmanager
    async def _crowd(self, name: str, number: int) -> AsyncGenerator[None, None]:
        """Let the large tenant ask for ten times its share meanwhile, which is half."""
        options = self._options
        warm = (BASE, *adapter_names(NUM_ADAPTERS)[:NUM_WARM])
        backlog = Backlog(
            name=f"{name}/{number}",
            url=options.url,
            key=LARGE,
            models=self._next_cold(warm) if name == COLD else warm,
            clients=10 * options.num_seats // 2,
            input_len=options.large_input,
            output_len=LONG_ANSWER if name == FULL else options.large_output,
            vocab_size=options.vocab_size,
        )
        async with asking(backlog):
            if name == FULL:
                await until_full(options.url, options.num_seats, TAKEN_WITHIN)
            await asyncio.sleep(SETTLE)
            yield

    def _next_cold(self, warm: tuple[str, ...]) -> tuple[str, ...]:
        """Return models of which every other one was not asked lately."""
        return tuple(
            model
            for index in range(NUM_ADAPTERS)
            for model in (warm[index % len(warm)], next(self._cold))
        )

    async def _first_tokens(self, client: httpx.AsyncClient, count: int) -> list[float]:
        options, jitter, times = self._options, Random(self._num_asked), []
        workload = Workload(
            name="small",
            models=(BASE,),
            concurrency=1,
            num_requests=count,
            input_len=options.small_input,
            output_len=options.small_output,
            vocab_size=options.vocab_size,
        )
        self._num_asked += count
        for ask in workload.asks(self._num_asked):
            began = time.perf_counter()
            first = 0.0
            async with aclosing(token_times(client, ask)) as tokens:
                async for at in tokens:
                    first = first or at
            times.append(first - began)
            rest = options.interval * jitter.uniform(0.7, 1.3) - (time.perf_counter() - began)
            await asyncio.sleep(max(0.0, rest))
        return times
