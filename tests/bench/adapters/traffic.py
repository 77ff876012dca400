"""Short calls from a process of its own, so that sending them delays nobody who measures streams.

`python -m tests.bench.adapters.traffic URL` answers each line of JSON, a burst of calls, with a
line that says when each was sent and answered. All times are in seconds of one clock.
"""

import asyncio
import json
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from deploy.bench.http_target import BenchError

LINE_LIMIT = 2**22  # bytes


@dataclass(frozen=True, slots=True)
class Call:
    """One POST and, if it must not be sent earlier, when: seconds after the burst begins."""

    path: str
    body: dict[str, Any]
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Burst:
    """What became of some calls, in their order."""

    begun: float
    sent: tuple[float, ...]
    answered: tuple[float, ...]

    @property
    def ended(self) -> float:
        """When the last answer came."""
        return max(self.answered)

    @property
    def offsets(self) -> tuple[float, ...]:
        """When each call was sent, seconds after the burst began."""
        return tuple(sent - self.begun for sent in self.sent)


class TrafficProcess:
    """Sends bursts to one server, at most `clients` calls at a time."""

    def __init__(self, url: str, clients: int) -> None:
        self._command = (sys.executable, "-m", "tests.bench.adapters.traffic", url)
        self._clients = clients
        self._child: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> "TrafficProcess":
        """Start the process."""
        self._child = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the process."""
        assert self._child is not None and self._child.stdin is not None
        self._child.stdin.close()
        await self._child.wait()

    async def send(self, calls: list[Call]) -> Burst:
        """Send calls in their order and return when all are answered.

        Raises:
            BenchError: if one is answered with another status than 200, or the process ends.
        """
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        burst = {"clients": self._clients, "calls": [asdict(call) for call in calls]}
        child.stdin.write(json.dumps(burst).encode() + b"\n")
        line = await child.stdout.readline()
        if not line:
            raise BenchError("the process that sends short calls has ended")
        reply = json.loads(line)
        if reply["errors"]:
            raise BenchError(f"{len(reply['errors'])} calls failed: {reply['errors'][0]}")
        return Burst(reply["begun"], tuple(reply["sent"]), tuple(reply["answered"]))


async def send_burst(
    client: httpx.AsyncClient, calls: list[Call], clients: int
) -> tuple[Burst, list[str]]:
    """Send calls in their order; return when, and what was answered with other than 200."""
    begun = time.perf_counter()
    waiting = deque(enumerate(calls))
    sent, answered, errors = [0.0] * len(calls), [0.0] * len(calls), []

    async def one_client() -> None:
        while waiting:
            index, call = waiting.popleft()
            await asyncio.sleep(begun + call.offset - time.perf_counter())
            sent[index] = time.perf_counter()
            reply = await client.post(call.path, json=call.body)
            answered[index] = time.perf_counter()
            if reply.status_code != 200:
                errors.append(f"{reply.status_code}: {reply.text}")

    await asyncio.gather(*(one_client() for _ in range(clients)))
    return Burst(begun, tuple(sent), tuple(answered)), errors


async def _serve_lines(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=600.0) as client:
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            calls = [Call(**call) for call in asked["calls"]]
            burst, errors = await send_burst(client, calls, asked["clients"])
            print(json.dumps({**asdict(burst), "errors": errors}), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve_lines(sys.argv[1]))
