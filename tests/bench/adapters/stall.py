"""What loads of adapters cost the streams of others.

A few long answers over adapters in slots are watched in phases: alone; while adapters that nobody
has touched get one short request each; while the same requests, sent at the same moments, go to
adapters in slots and the base model; and while such adapters are loaded by the API, without a
request. The second over the third is the cost of loading; over the first, that of the traffic
as well.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx

from deploy.bench.http_target import BenchError
from deploy.bench.workload import Ask, Workload, percentile
from tests.bench.adapters.directories import drop_from_page_cache
from tests.bench.adapters.server import BASE, BenchServer
from tests.bench.adapters.streams import Streams, Window, watch
from tests.bench.adapters.traffic import Burst, Call, TrafficProcess
from tests.bench.light_http import light_client

ALONE, COLD, WARM, LOADS = "alone", "cold requests", "same requests, no loads", "loads only"
NUM_FIRST = 8  # tokens of each stream before a phase counts
STREAM_TOKENS = 4000  # more than any phase lasts
INPUT_LEN = 32  # tokens of a stream's prompt
SHORT_LEN = 8  # tokens of a short request's prompt
CLIENTS = 4  # short requests at a time
NUM_STREAMS, NUM_RESIDENT = 4, 8
MIN_SLOTS = NUM_STREAMS + NUM_RESIDENT + CLIENTS  # so that loads drive none of these out


@dataclass(frozen=True, slots=True, kw_only=True)
class StallOptions:
    """How much is measured."""

    names: tuple[str, ...]  # of the adapters that are served; the first ones are kept in slots
    directory: Path  # of these adapters
    vocab_size: int
    rounds: int
    num_streams: int = NUM_STREAMS
    num_resident: int = NUM_RESIDENT  # adapters in slots that get the short requests
    num_short: int = 50  # requests or loads in a phase
    alone_tokens: int = 60  # of each stream, in the phase alone
    load_only: bool = False  # measure only loads by the API
    drop_page_cache: bool = True  # of adapters that nobody has touched


@dataclass(slots=True)
class Phase:
    """One kind of phase over all rounds; times in seconds."""

    name: str
    gaps: list[list[float]] = field(default_factory=list)  # between tokens, by round
    seconds: list[float] = field(default_factory=list)  # by round
    loads: list[int] = field(default_factory=list)  # into slots, by round

    def gap(self, percent: float) -> float:
        """Return a percentile of the gaps of all rounds."""
        return percentile([gap for round_ in self.gaps for gap in round_], percent)

    def ratio(self, other: "Phase", percent: float) -> float:
        """Return a percentile over that of another phase."""
        return self.gap(percent) / other.gap(percent)


class StallBench:
    """Measures one server; adapters that have been touched are not cold again."""

    def __init__(
        self, server: BenchServer, options: StallOptions, told: Callable[[str], None]
    ) -> None:
        self._server = server
        self._options = options
        self._told = told
        kept = options.num_streams + options.num_resident
        self._streamed = options.names[: options.num_streams]
        self._resident = options.names[options.num_streams : kept]
        self._untouched = iter(options.names[kept:])
        names = (ALONE, LOADS) if options.load_only else (ALONE, COLD, WARM, LOADS)
        self._phases = {name: Phase(name) for name in names}
        self._num_watched = 0
        self._num_short = 0

    def run(self) -> list[Phase]:
        """Measure all phases in every round, after one that does not count.

        Raises:
            BenchError: if a phase was not what its name says.
        """
        asyncio.run(self._run())
        return list(self._phases.values())

    async def _run(self) -> None:
        async with (
            light_client(self._server.url) as client,
            TrafficProcess(self._server.url, CLIENTS) as traffic,
        ):
            for number in range(self._options.rounds + 1):
                await self._round(client, traffic, number)

    async def _round(self, client: httpx.AsyncClient, traffic: TrafficProcess, number: int) -> None:
        bursts: dict[str, Burst] = {}

        async def alone(streams: Streams) -> Window:
            start, wanted = time.perf_counter(), NUM_FIRST + self._options.alone_tokens
            await streams.until(lambda times: len(times) >= wanted)
            return Window(start, time.perf_counter())

        def under(name: str, calls: list[Call]) -> Callable[[Streams], Awaitable[Window]]:
            async def burst(streams: Streams) -> Window:
                bursts[name] = await traffic.send(calls)
                return Window(bursts[name].begun, bursts[name].ended)

            return burst

        for name, phase in self._phases.items():
            self._told(f"stall, {'warm-up' if number == 0 else f'round {number}'}: {name}")
            await traffic.send([self._short(model) for model in self._all_resident()])
            calls = self._calls(name, bursts)
            before = self._server.counts().loads
            window = alone if name == ALONE else under(name, calls)
            gaps = await watch(client, self._asks(), window, NUM_FIRST)
            loads = self._server.counts().loads - before
            self._check(name, loads)
            if number > 0:
                phase.gaps.append(gaps)
                phase.loads.append(loads)
                if name in bursts:
                    phase.seconds.append(bursts[name].ended - bursts[name].begun)

    def _all_resident(self) -> tuple[str, ...]:
        return (*self._streamed, *self._resident, BASE)

    def _calls(self, name: str, bursts: dict[str, Burst]) -> list[Call]:
        count = self._options.num_short
        if name == COLD:
            return [self._short(model) for model in self._next_untouched(count)]
        if name == WARM:
            models = cycle((*self._resident, BASE))
            return [
                self._short(model, offset)
                for model, offset in zip(models, bursts[COLD].offsets, strict=False)
            ]
        if name == LOADS:
            return [self._load(model) for model in self._next_untouched(count)]
        return []

    def _next_untouched(self, count: int) -> list[str]:
        names = list(islice(self._untouched, count))
        if len(names) < count:
            raise BenchError("no untouched adapters are left: fewer rounds, or more adapters")
        for name in names:
            if self._server.adapter(name)["digest"] is not None:
                raise BenchError(f"{name} has been read already")
            if self._options.drop_page_cache:
                drop_from_page_cache(self._options.directory / name)
        return names

    def _short(self, model: str, offset: float = 0.0) -> Call:
        self._num_short += 1
        (ask,) = self._workload("short", (model,), SHORT_LEN, 1).asks(self._num_short)
        body: dict[str, Any] = {"model": model, "prompt": ask.token_ids, "max_tokens": 1}
        return Call("/v1/completions", {**body, "temperature": 0, "ignore_eos": True}, offset)

    def _load(self, model: str) -> Call:
        path = str(self._options.directory / model)
        return Call("/v1/load_lora_adapter", {"lora_name": f"loaded-{model}", "lora_path": path})

    def _asks(self) -> tuple[Ask, ...]:
        self._num_watched += 1
        load = self._workload("stall", self._streamed, INPUT_LEN, STREAM_TOKENS)
        return load.asks(self._num_watched)

    def _workload(
        self, name: str, models: tuple[str, ...], input_len: int, output_len: int
    ) -> Workload:
        return Workload(
            name=name,
            models=models,
            concurrency=len(models),
            num_requests=len(models),
            input_len=input_len,
            output_len=output_len,
            vocab_size=self._options.vocab_size,
        )

    def _check(self, name: str, loads: int) -> None:
        """Refuse a phase in which other adapters came into slots than it is about."""
        wanted = self._options.num_short if name == COLD else 0
        if loads != wanted:
            raise BenchError(f"{name}: {loads} adapters came into slots, not {wanted}")
