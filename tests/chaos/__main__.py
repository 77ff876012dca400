"""Strike a server again and again under mixed streams and compare every answer: `make chaos`."""

import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Annotated

import httpx
import typer

from tests.chaos.blows import BLOWS
from tests.chaos.traffic import Answer, Ask, answer_of, make_asks
from tests.end_to_end.asking import wait_for
from tests.end_to_end.processes import resident_bytes
from tests.end_to_end.server import MODELS, Server

READ_TIMEOUT = 180.0  # seconds without a chunk, far beyond any pause


def run_all(
    server: Server, asks: list[Ask], strike: float | None, blow: str, random: Random
) -> tuple[list[Answer], float]:
    """Make all calls at once, strike after some seconds; return the answers and the moment."""
    struck = 0.0
    with (
        httpx.Client(base_url=server.url, timeout=READ_TIMEOUT) as client,
        ThreadPoolExecutor(len(asks)) as threads,
    ):
        running = [threads.submit(answer_of, client, ask) for ask in asks]
        if strike is not None:
            time.sleep(strike)
            struck = time.time()
            BLOWS[blow](server, random)
        return [one.result() for one in running], struck


def differences(asks: list[Ask], answers: list[Answer], undisturbed: list[Answer]) -> list[str]:
    """Return what is not as it was without a blow."""
    found = []
    for ask, answer, expected in zip(asks, answers, undisturbed, strict=True):
        if answer.error or answer.content != expected.content:
            what = answer.error or f"{answer.content} instead of {expected.content}"
            found.append(f"call {ask.number} ({ask.body['model']}): {what[:600]}")
    return found


def is_healthy(server: Server) -> bool:
    """Tell whether the server says so, whoever has to pass it on."""
    try:
        return server.is_healthy()
    except httpx.HTTPError:
        return False


def percentile(values: list[float], share: float) -> float:
    """Return the value that a share of all are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


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
    server.wait_until_ready()
    start_seconds = time.monotonic() - began
    print(f"ready after {start_seconds:.1f} s; its output is in {path}", flush=True)
    asks = make_asks(MODELS[:5], streams, seed)
    undisturbed, _ = run_all(server, asks, None, "none", random)
    again, _ = run_all(server, asks, None, "none", random)
    wrong = differences(asks, again, undisturbed)
    assert not wrong, f"it differs without any blow: {wrong}"
    normal = max(answer.longest_gap for answer in again)
    processes, memory = len(server.processes()), resident_bytes(server.processes())
    names = blows.split(",")
    pauses: dict[str, list[float]] = {name: [] for name in names}
    deadline = time.monotonic() + 60 * minutes
    number = num_wrong = 0
    while number < rounds * len(names) if not minutes else time.monotonic() < deadline:
        name = names[number % len(names)]
        number += 1
        answers, _ = run_all(server, asks, random.uniform(0.3, 2.0), name, random)
        wrong = differences(asks, answers, undisturbed)
        num_wrong += len(wrong)
        pauses[name] += [answer.longest_gap for answer in answers]
        longest = max(answer.longest_gap for answer in answers)
        broken = sum(answer.num_breaks > 0 for answer in answers)
        line = f"{len(wrong)} wrong, {broken} read on, longest gap {longest:.1f} s"
        print(f"{number} {name}: {line}", flush=True)
        for line in wrong[:3]:
            print(f"   {line}", flush=True)
        wait_for(lambda: is_healthy(server))
    summary = {
        "start_seconds": round(start_seconds, 1),
        "gap_undisturbed": round(normal, 2),
        "streams": number * streams,
        "wrong": num_wrong,
        "gap": {
            name: {
                "p50": round(statistics.median(values), 2),
                "p99": round(percentile(values, 0.99), 2),
            }
            for name, values in pauses.items()
            if values
        },
        "processes": [processes, len(server.processes())],
        "mib": [memory >> 20, resident_bytes(server.processes()) >> 20],
    }
    server.stop()
    print(json.dumps(summary))
    sys.exit(bool(num_wrong))


if __name__ == "__main__":
    typer.run(main)
