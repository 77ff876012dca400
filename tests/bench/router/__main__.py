"""`python -m tests.bench.router`: CPU time per streamed token of the router and of the client.

Starts a router and a pretended scheduler, a process each, and streams from them. What a token costs
the router depends on how much of the caches others leave it; compare runs in turns.
"""

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import httpx
import typer

from deploy.bench.http_target import OPENAI, Count, token_times
from deploy.bench.workload import Ask
from deploy.demo.model import DEFAULT_TARGET
from tests.bench.light_http import light_client


class Child:
    """A process of this benchmark that says one line and stays until it is ended."""

    def __init__(self, module: str, *arguments: str) -> None:
        command = (sys.executable, "-m", f"tests.bench.router.{module}", *arguments)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdout is not None
        self.line = self._process.stdout.readline().strip()

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all its threads so far."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def end(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.communicate()


class Chat:
    """Chats instead of completions, of which each event is one token."""

    path = "/v1/chat/completions"

    def body(self, ask: Ask) -> dict[str, object]:
        """Return a request for exactly so many tokens, whatever was to be asked."""
        return {
            "model": ask.model,
            "messages": [{"role": "user", "content": "What is a graft?"}],
            "max_completion_tokens": ask.num_output_tokens,
            "ignore_eos": True,
            "stream": True,
        }

    def counter(self) -> Count:
        """Return what counts each event as one."""
        return lambda _: 1


async def stream_all(url: str, num_streams: int, num_tokens: int, chat: bool) -> int:
    """Take that many streams to their ends, side by side; return how many tokens came."""
    dialect = Chat() if chat else OPENAI
    ask = Ask("model", (5, 6, 7), num_tokens)

    async def one(client: httpx.AsyncClient) -> int:
        return len([at async for at in token_times(client, ask, dialect)])

    async with light_client(url) as client:
        return sum(await asyncio.gather(*(one(client) for _ in range(num_streams))))


def main(
    streams: Annotated[int, typer.Option(help="Side by side.")] = 16,
    tokens: Annotated[int, typer.Option(help="Of each stream.")] = 200,
    step_ms: Annotated[float, typer.Option(help="From one token of a stream to the next.")] = 8,
    rounds: Annotated[int, typer.Option(help="After one that does not count.")] = 3,
    chat: Annotated[bool, typer.Option(help="Chats, not completions.")] = False,
    model: Annotated[Path, typer.Option(help="Where the tokenizer lies.")] = DEFAULT_TARGET,
) -> None:
    """Tell milliseconds of CPU per token."""
    scheduler = Child("scheduler", str(model), str(tokens), str(step_ms))
    router = Child("serving", str(model), scheduler.line)
    url = f"http://127.0.0.1:{router.line}"
    try:
        for number in range(rounds + 1):
            before, own = router.cpu_seconds, time.process_time()
            count = asyncio.run(stream_all(url, streams, tokens, chat))
            used, own = router.cpu_seconds - before, time.process_time() - own
            name = f"round {number}" if number else "warm-up"
            print(
                f"{name}: {count} tokens, router {1000 * used / count:.4f} ms/token, "
                f"client {1000 * own / count:.4f} ms/token",
                flush=True,
            )
    finally:
        router.end()
        scheduler.end()


if __name__ == "__main__":
    typer.run(main)
