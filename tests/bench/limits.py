"""`python -m tests.bench.limits`: what keys are granted of their limits, over three routers.

A server with a limit of each kind, each of a key of its own, and several times as many calls as it
allows, on connections that the load balancer spreads. What was granted is read from the server's
own request log. The configured number is what holds in any minute, so over whole minutes it is what
is granted, too, as far as no demand is lost.
"""

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import yaml

from deploy.demo.model import DEFAULT_TARGET
from tests.bench.adapters.server import BASE, BenchServer
from tests.bench.light_http import light_client

ROUTERS = 3
MINUTE = 60.0
REQUESTS, TOKENS, PLACES = 300, 9000, 4  # the limits
SLACK = 0.03  # of a limit
# Seconds: a call's line begins before its place is asked for and ends when that is free already, on
# busy cores by some hundredths each. An answer has its place for seconds.
HANDOVER = 0.1
OPTIONS = {"temperature": 0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Demand:
    """Calls of one key, one every so many seconds."""

    key: str
    limits: dict[str, int]
    prompt: tuple[int, ...]
    num_output_tokens: int
    interval: float

    def body(self, number: int) -> dict[str, Any]:
        """Return a call, no two alike."""
        prompt = [*self.prompt, 100 + number % 20_000]
        asked = {"model": BASE, "prompt": prompt, "max_tokens": self.num_output_tokens}
        return asked | OPTIONS | {"stream": self.key == "places"}


DEMANDS = (
    Demand("requests", {"requests_per_minute": REQUESTS}, (500, 600), 1, 1 / 15),
    Demand("tokens", {"tokens_per_minute": TOKENS}, tuple(range(500, 519)), 10, 1 / 15),
    Demand("places", {"max_concurrency": PLACES}, (700, 800), 64, 1 / 25),
)


@dataclass(frozen=True, slots=True)
class Line:
    """What the request log says of one call."""

    key: str
    router: str
    status: int
    begin: float  # seconds since 1970
    end: float
    num_tokens: int

    @classmethod
    def read(cls, text: str) -> "Line":
        """Return a line of the log."""
        told = json.loads(text)
        begin = datetime.fromisoformat(told["time"]).timestamp()
        num_tokens = told.get("prompt_tokens", 0) + told.get("generated_tokens", 0)
        end = begin + told["seconds"]
        return cls(told["key"], told["router"], told["status"], begin, end, num_tokens)


async def offer(url: str, minutes: int) -> Counter[str]:
    """Send all demands for so long; return how many calls ended how, by status or fault."""
    outcomes: Counter[str] = Counter()
    async with asyncio.TaskGroup() as group:
        for demand in DEMANDS:
            group.create_task(_offer(url, demand, minutes * MINUTE, outcomes))
    return outcomes


async def _offer(url: str, demand: Demand, seconds: float, outcomes: Counter[str]) -> None:
    loop = asyncio.get_running_loop()
    begin = loop.time()
    headers = {"Authorization": f"Bearer key of {demand.key}"}
    async with light_client(url, headers) as client, asyncio.TaskGroup() as group:
        for number in range(int(seconds / demand.interval)):
            await asyncio.sleep(begin + number * demand.interval - loop.time())
            group.create_task(_ask(client, demand.body(number), outcomes))


async def _ask(client: httpx.AsyncClient, body: dict[str, Any], outcomes: Counter[str]) -> None:
    try:
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            await reply.aread()
        outcomes[str(reply.status_code)] += 1
    except httpx.TransportError as error:
        outcomes[type(error).__name__] += 1


def most_in_a_minute(amounts: Sequence[tuple[float, int]]) -> int:
    """Return the greatest sum within 60 seconds, wherever they begin; (moment, amount) each."""
    ordered = sorted(amounts)
    most = total = first = 0
    for moment, amount in ordered:
        total += amount
        while ordered[first][0] <= moment - MINUTE:
            total -= ordered[first][1]
            first += 1
        most = max(most, total)
    return most


def most_at_a_time(spans: Iterable[tuple[float, float]]) -> int:
    """Return how many spans overlap at most."""
    moments = [moment for a, b in spans for moment in ((a, 1), (max(a, b - HANDOVER), -1))]
    most = total = 0
    for _, change in sorted(moments):
        total += change
        most = max(most, total)
    return most


def report(lines: Sequence[Line], minutes: int) -> list[tuple[str, float, float, float]]:
    """Return (what, configured, granted on average, at most) of each limit."""
    begin = min(line.begin for line in lines)
    end = begin + minutes * MINUTE
    granted = [line for line in lines if line.status == 200 and line.begin < end]
    rows = []
    for key, limit in (("requests", REQUESTS), ("tokens", TOKENS)):
        amounts = [
            (line.begin, 1 if key == "requests" else line.num_tokens)
            for line in granted
            if line.key == key
        ]
        mean = sum(amount for _, amount in amounts) / minutes
        rows.append((f"{key} a minute", float(limit), mean, float(most_in_a_minute(amounts))))
    spans = [(line.begin, min(line.end, end)) for line in granted if line.key == "places"]
    held = sum(b - a for a, b in spans) / (end - min(a for a, _ in spans))
    rows.append(("answers at a time", float(PLACES), held, float(most_at_a_time(spans))))
    return rows


def write_keys(path: Path) -> None:
    """Write a key for each demand."""
    entries = [
        {"key": f"key of {one.key}", "name": one.key, "tenant": one.key, "limits": one.limits}
        for one in DEMANDS
    ]
    path.write_text(yaml.safe_dump(entries))


def main(
    minutes: Annotated[int, typer.Option(help="Of demand.")] = 3,
    model: Annotated[Path, typer.Option(help="Directory of the model.")] = DEFAULT_TARGET,
) -> None:
    """Tell what was granted of each limit; end with 1 if one is further off than 3 %."""
    with tempfile.TemporaryDirectory() as folder:
        keys, log = Path(folder) / "keys.yaml", Path(folder) / "calls"
        write_keys(keys)
        flags = ("--api-key-file", str(keys), "--request-log", str(log), "--routers", str(ROUTERS))
        with BenchServer("limits", model, "--tp", "1", *flags) as server:
            outcomes = asyncio.run(offer(server.url, minutes))
        lines = [Line.read(text) for text in log.read_text().splitlines()]
    by_router = Counter(line.router for line in lines)
    print(f"{len(lines)} calls in {minutes} minutes, by router: {sorted(by_router.values())}")
    print("ended with", ", ".join(f"{what}: {n}" for what, n in sorted(outcomes.items())))
    is_off = False
    for what, configured, mean, most in report(lines, minutes):
        print(
            f"{what}: configured {configured:g}, granted {mean:.2f} on average "
            f"({100 * mean / configured:.1f} %), {most:g} at most"
        )
        is_off |= abs(mean / configured - 1) > SLACK or most > configured * (1 + SLACK)
    raise typer.Exit(1 if is_off else 0)


if __name__ == "__main__":
    typer.run(main)
