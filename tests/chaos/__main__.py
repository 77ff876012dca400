"""Strike a server again and again under mixed streams and compare every answer: `make chaos`."""

import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import typer

from tests.chaos.blows import (
    AT_FRONT_DOOR,
    BLOWS,
    haproxy_directory,
    num_routers_in_use,
    routers,
)
from tests.chaos.churn import Churn
from tests.chaos.footprint import Footprint
from tests.chaos.new_calls import NewCalls
from tests.chaos.traffic import Answer, Ask, answer_of, make_asks
from tests.end_to_end.asking import wait_for
from tests.end_to_end.processes import runs
from tests.end_to_end.server import MODELS, Server, adapter_dirs

MAY_GROW = 0.15  # share of processes, memory, files and objects, after the first turn of blows
READ_TIMEOUT = 180.0  # seconds without a chunk, far beyond any pause


@dataclass
class Outcome:
    """What came of one blow."""

    answers: list[Answer]
    noticed: float  # seconds until all that was struck had ended
    new_calls: list[float]  # seconds that each one took


def run_all(
    server: Server, asks: list[Ask], strike: float | None, blow: str, random: Random
) -> Outcome:
    """Make all calls at once and strike after some seconds; if at the front door, call anew."""
    noticed, new_calls = 0.0, NewCalls(server.url)
    with (
        httpx.Client(base_url=server.url, timeout=READ_TIMEOUT) as client,
        ThreadPoolExecutor(len(asks)) as threads,
    ):
        running = [threads.submit(answer_of, client, ask) for ask in asks]
        if strike is not None:
            time.sleep(strike)
            began = time.monotonic()
            with new_calls if blow in AT_FRONT_DOOR else nullcontext():
                struck = BLOWS[blow](server, random)
                wait_for(lambda: not any(runs(pid) for pid in struck))
                noticed = time.monotonic() - began
        return Outcome([one.result() for one in running], noticed, new_calls.seconds)


def differences(asks: list[Ask], answers: list[Answer], undisturbed: list[Answer]) -> list[str]:
    """Return what is not as it was without a blow."""
    found = []
    for ask, answer, expected in zip(asks, answers, undisturbed, strict=True):
        if answer.error or answer.content != expected.content:
            what = answer.error or f"{answer.content} instead of {expected.content}"
            found.append(f"call {ask.number} ({ask.body['model']}): {what[:600]}")
    return found


def is_whole(server: Server, haproxy: Path, num_routers: int) -> bool:
    """Tell whether it says that it is healthy and has all routers, whoever has to pass it on."""
    try:
        return server.is_healthy() and num_routers_in_use(haproxy) == num_routers
    except (httpx.HTTPError, OSError):
        return False


def percentile(values: list[float], share: float) -> float:
    """Return the value that a share of all are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Tally:
    """What came of all blows."""

    def __init__(self) -> None:
        self.num_streams = self.num_wrong = 0
        self.footprints: list[Footprint] = []  # after each turn of all blows
        self._pauses: dict[str, list[float]] = {}  # seconds, the longest gap of each stream
        self._noticed: dict[str, list[float]] = {}  # seconds
        self._new_calls: dict[str, list[float]] = {}  # seconds

    def add(self, blow: str, outcome: Outcome, num_wrong: int) -> None:
        """Take in one blow."""
        self.num_streams += len(outcome.answers)
        self.num_wrong += num_wrong
        pauses = (answer.longest_gap for answer in outcome.answers)
        self._pauses.setdefault(blow, []).extend(pauses)
        self._noticed.setdefault(blow, []).append(outcome.noticed)
        if outcome.new_calls:
            self._new_calls.setdefault(blow, []).extend(outcome.new_calls)

    def summary(self) -> dict[str, Any]:
        """Return all of it by blow, and the footprint after the first turn and the last."""
        return {
            "streams": self.num_streams,
            "wrong": self.num_wrong,
            "gap": {
                name: {
                    "p50": round(statistics.median(values), 2),
                    "p99": round(percentile(values, 0.99), 2),
                    "ended": round(max(self._noticed[name]), 2),
                }
                for name, values in self._pauses.items()
            },
            "new_calls": {
                name: {"calls": len(values), "slowest": round(max(values), 2)}
                for name, values in self._new_calls.items()
            },
            "footprints": [asdict(one) for one in self.footprints[:1] + self.footprints[-1:]],
        }


def main(
    blows: Annotated[str, typer.Option(help="Names, with commas.")] = "kill-rank",
    rounds: Annotated[int, typer.Option(help="Times that each blow is struck.")] = 10,
    minutes: Annotated[float, typer.Option(help="Go on for so long; 0: by rounds.")] = 0.0,
    streams: Annotated[int, typer.Option(help="Calls at once.")] = 16,
    seed: Annotated[int, typer.Option(help="Of traffic and blows.")] = 1,
    tp: Annotated[int, typer.Option(help="Ranks.")] = 2,
    flags: Annotated[str, typer.Option(help="More flags of topwork serve.")] = "",
    log: Annotated[Path | None, typer.Option(help="Where the server's output goes.")] = None,
) -> None:
    """Print one line for each blow and a summary as JSON; exit with 1 if any answer differs."""
    random, path = Random(seed), log or Path(tempfile.mkdtemp()) / "server.log"
    began = time.monotonic()
    server = Server(path, "--tp", str(tp), *flags.split())
    try:
        server.wait_until_ready()
        start_seconds = time.monotonic() - began
        print(f"ready after {start_seconds:.1f} s; its output is in {path}", flush=True)
        asks = make_asks(MODELS[:5], streams, seed)
        undisturbed = run_all(server, asks, None, "none", random).answers
        again = run_all(server, asks, None, "none", random).answers
        wrong = differences(asks, again, undisturbed)
        assert not wrong, f"it differs without any blow: {wrong}"
        normal = max(answer.longest_gap for answer in again)
        told = {
            "start_seconds": round(start_seconds, 1),
            "gap_undisturbed": round(normal, 2),
        }
        name, directory = list(adapter_dirs().items())[-1]
        with Churn(server.url, name, directory) as churn:
            tally = strike_all(server, asks, undisturbed, blows.split(","), rounds, minutes, random)
    finally:
        server.stop()
    print(json.dumps(told | tally.summary() | {"loads": churn.num_loads}))
    grown = tally.footprints[-1].grown(tally.footprints[0], MAY_GROW)
    for failure in (*churn.failures[:9], *grown):
        print(failure)
    sys.exit(bool(tally.num_wrong or churn.failures or grown))


def strike_all(
    server: Server,
    asks: list[Ask],
    undisturbed: list[Answer],
    names: list[str],
    rounds: int,
    minutes: float,
    random: Random,
) -> Tally:
    """Strike in turn, by rounds or for so many minutes, and compare all answers."""
    tally, haproxy, num_routers = Tally(), haproxy_directory(server), len(routers(server))
    deadline = time.monotonic() + 60 * minutes
    number = 0
    while number < rounds * len(names) if not minutes else time.monotonic() < deadline:
        name = names[number % len(names)]
        number += 1
        outcome = run_all(server, asks, random.uniform(0.3, 2.0), name, random)
        answers = outcome.answers
        wrong = differences(asks, answers, undisturbed)
        tally.add(name, outcome, len(wrong))
        longest = max(answer.longest_gap for answer in answers)
        broken = sum(answer.num_breaks > 0 for answer in answers)
        line = f"{len(wrong)} wrong, {broken} read on, longest gap {longest:.1f} s"
        print(f"{number} {name}: {line}, ended after {outcome.noticed:.1f} s", flush=True)
        if outcome.new_calls:
            print(f"   new calls took {max(outcome.new_calls):.2f} s at most", flush=True)
        for line in wrong[:3]:
            print(f"   {line}", flush=True)
        wait_for(lambda: is_whole(server, haproxy, num_routers))
        # The first turn of each makes what stays: caches fill, logs are opened.
        if number % len(names) == 0:
            tally.footprints.append(Footprint.of(server))
    return tally


if __name__ == "__main__":
    typer.run(main)
