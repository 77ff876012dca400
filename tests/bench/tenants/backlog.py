"""A tenant that always wants more: requests from a process of its own until it is ended.

`python -m tests.bench.tenants.backlog` reads one line of JSON, a `Backlog`, and asks until its
input ends. Answers are not streamed, so that neither this process nor the router takes the cores
from what is measured.
"""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

import httpx

from deploy.bench.http_target import OPENAI, BenchError
from deploy.bench.workload import Ask, Workload
from tests.bench.light_http import light_client

MAX_REQUESTS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Who asks what, how many at a time."""

    name: str  # of the phase: no two of them have a prompt in common
    url: str
    key: str
    models: tuple[str, ...]  # asked in turn
    clients: int
    input_len: int  # tokens
    output_len: int  # tokens
    vocab_size: int

    def workload(self) -> Workload:
        """Return the requests, more than will be sent."""
        return Workload(
            name=self.name,
            models=self.models,
            concurrency=self.clients,
            num_requests=1,
            input_len=self.input_len,
            output_len=self.output_len,
            vocab_size=self.vocab_size,
        )

    def ask(self, number: int) -> Ask:
        """Return one of the requests."""
        (ask,) = self.workload().asks(number)
        return Ask(self.models[number % len(self.models)], ask.token_ids, ask.num_output_tokens)


@asynccontextmanager
async def asking(backlog: Backlog) -> AsyncGenerator[None, None]:
    """Have a process ask meanwhile.

    Raises:
        BenchError: at the end, if it has ended before: a call failed.
    """
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.tenants.backlog"), stdin=asyncio.subprocess.PIPE
    )
    assert child.stdin is not None, "a pipe was asked for"
    child.stdin.write(json.dumps(asdict(backlog)).encode() + b"\n")
    try:
        yield
    finally:
        has_ended = child.returncode is not None
        child.stdin.close()
        await child.wait()
    if has_ended:
        raise BenchError(f"the tenant of {backlog.name} has stopped asking")


async def _ask_on(backlog: Backlog) -> None:
    numbers = iter(range(MAX_REQUESTS))
    headers = {"Authorization": f"Bearer {backlog.key}"}

    async def one_client(client: httpx.AsyncClient) -> None:
        for number in numbers:
            body = OPENAI.body(backlog.ask(number))
            body = {**body, "stream": False, "return_token_ids": False}
            reply = await client.post(OPENAI.path, json=body)
            if reply.status_code != 200:
                raise BenchError(f"{reply.status_code}: {reply.text}")

    async with light_client(backlog.url, headers) as client:
        asking = [asyncio.create_task(one_client(client)) for _ in range(backlog.clients)]
        ending = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        done, _ = await asyncio.wait((ending, *asking), return_when=asyncio.FIRST_COMPLETED)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        for task in done - {ending}:
            print(f"{backlog.name}: {task.exception()}", file=sys.stderr)
            raise SystemExit(1)


if __name__ == "__main__":
    told = json.loads(sys.stdin.readline())
    asyncio.run(_ask_on(Backlog(**{**told, "models": tuple(told["models"])})))
