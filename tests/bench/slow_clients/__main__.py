"""`python -m tests.bench.slow_clients`: whether clients that are slow harm one that is not.

Starts a server with the demo model. For each kind of slow client: the time to first token of an
ordinary one beside them, how many of them the server has at the start, and until when it has ended
the last one. Judges nothing: goals stand beside the figures.
"""

import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tests.bench.slow_clients.clients import ADDRESSES, request
from tests.bench.slow_clients.sockets import num_sockets
from tests.end_to_end.server import Server

NUMBERS = {
    "idle sockets": 10_000,
    "half-sent heads": 1000,
    "half-sent bodies": 100,
    "quick readers": 100,
    "slow readers": 100,
}
GOAL = 1.2  # times the time to first token of a client that is alone
PATIENCE = 300.0  # seconds until the rest of them is left alone
TOKENS = 8
CALL_TIMEOUT = 300.0  # seconds: beside readers the ranks are busy with what these have asked


def time_to_first_token(port: int, number: int) -> float:
    """Return the seconds from opening a connection to the first token of a stream of a few."""
    body = {
        "model": "smollm2",
        "stream": True,
        "max_tokens": TOKENS,
        "messages": [{"role": "user", "content": f"Which number comes after {number}?"}],
    }
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=CALL_TIMEOUT) as client:
        client.sendall(request("/v1/chat/completions", json.dumps(body).encode()))
        received, first = b"", 0.0
        while b"[DONE]" not in received:
            data = client.recv(65536)
            assert data, f"no whole answer: {received[:500]!r}"
            received += data
            # The first event has the role only.
            if not first and received.count(b"data: ") >= 2:
                first = time.monotonic() - began
    return first


def measured(port: int, seconds: float) -> list[float]:
    """Return the times to first token of one client that asks again and again for a while."""
    times: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times) < 3:
        times.append(time_to_first_token(port, len(times)))
    return times


def one_kind(kind: str, number: int, port: int, seconds: float) -> tuple[list[float], list[str]]:
    """Return times to first token beside one kind of client, and what became of these clients."""
    command = [sys.executable, "-m", "tests.bench.slow_clients.clients"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, kind, str(port), str(number)], stdin=pipe, stdout=pipe, text=True
    ) as clients:
        assert clients.stdout is not None and clients.stdin is not None
        began = time.monotonic()
        clients.stdout.readline()
        opening = time.monotonic() - began
        at_first = num_sockets(port, ADDRESSES[kind])
        times = measured(port, seconds)
        while (left := num_sockets(port, ADDRESSES[kind])) and time.monotonic() - began < PATIENCE:
            time.sleep(0.5)
        ended = time.monotonic() - began
        clients.stdin.write("\n")
        clients.stdin.flush()
        answers = json.loads(clients.stdout.readline())
    fate = ", ".join(f"{count} {what}" for what, count in sorted(answers.items()))
    end = f"{ended:.0f} s" if not left else f"{left} never"
    return times, [str(at_first), f"{opening:.0f} s", end, fate]


def main(
    port: Annotated[int, typer.Option(help="Of the server.")] = 8100,
    seconds: Annotated[float, typer.Option(help="That the ordinary client asks each time.")] = 30.0,
    kind: Annotated[list[str] | None, typer.Option(help="Only this one; repeatable.")] = None,
) -> None:
    """Measure each kind in turn, and print a table."""
    table = Table("clients", "number", "TTFT, median", "largest", f"of alone (goal {GOAL})")
    for column in ("server has", "opened in", "all ended after", "what they found"):
        table.add_column(column)
    with TemporaryDirectory(prefix="tw-") as folder:
        server = Server(Path(folder) / "log", "--tp", "1", port=port)
        try:
            server.wait_until_ready()
            measured(port, 5)
            alone = measured(port, seconds)
            base = statistics.median(alone)
            table.add_row("none", "", f"{base * 1e3:.0f} ms", f"{max(alone) * 1e3:.0f} ms", "1.00")
            for name in kind or NUMBERS:
                times, fate = one_kind(name, NUMBERS[name], port, seconds)
                median, most = statistics.median(times), max(times)
                cells = [f"{median * 1e3:.0f} ms", f"{most * 1e3:.0f} ms", f"{median / base:.2f}"]
                table.add_row(name, str(NUMBERS[name]), *cells, *fate)
        finally:
            server.stop()
            Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)
