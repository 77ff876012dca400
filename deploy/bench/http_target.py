"""A server with OpenAI's completions API as the target of a workload."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import httpx
import msgspec

from deploy.bench.light_http import light_client
from deploy.bench.measure import Run, Sample
from deploy.bench.workload import Ask, Workload

Asking = Callable[[httpx.AsyncClient, Ask], AsyncGenerator[float, None]]


class BenchError(Exception):
    """The target answered something other than the tokens that were asked for."""


class HttpTarget:
    """Streams completions from a base URL; `asking` speaks the server's own language."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        label: str = "topwork",
        asking: Asking | None = None,
    ) -> None:
        self.label = label
        self._asking = asking or token_times
        self._url = url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def run(self, workload: Workload, round_number: int) -> Run:
        """Answer one round of a workload and return its times.

        Raises:
            BenchError: if the server cannot be reached or gives another answer.
        """
        return asyncio.run(self._run(workload, workload.asks(round_number)))

    def close(self) -> None:
        """Do nothing: every round opens and closes its own connections."""

    async def _run(self, workload: Workload, asks: tuple[Ask, ...]) -> Run:
        waiting = deque(asks)
        samples: list[Sample] = []
        async with light_client(self._url, self._headers) as client:

            async def one_client() -> None:
                while waiting:
                    samples.append(await self._ask(client, waiting.popleft()))

            await asyncio.gather(*(one_client() for _ in range(workload.concurrency)))
        return Run(tuple(samples))

    async def _ask(self, client: httpx.AsyncClient, ask: Ask) -> Sample:
        sent = time.perf_counter()
        times = [at async for at in self._asking(client, ask)]
        if len(times) != ask.num_output_tokens:
            raise BenchError(f"{len(times)} tokens instead of {ask.num_output_tokens}")
        return Sample(sent, tuple(times))


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    """What a benchmark reads of one event: who asks for more pays for it on the server's cores."""

    choices: list[_Choice] | None = None
    error: msgspec.Raw = msgspec.Raw()


_chunk_of = msgspec.json.Decoder(_Chunk).decode


async def token_times(client: httpx.AsyncClient, ask: Ask) -> AsyncGenerator[float, None]:
    """Send one request and yield when each of its tokens arrives, in seconds of perf_counter.

    Raises:
        BenchError: if the server answers with an error.
    """
    body = {
        "model": ask.model,
        "prompt": list(ask.token_ids),
        "max_tokens": ask.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            raise BenchError(f"{reply.status_code}: {(await reply.aread()).decode()}")
        async with aclosing(event_data(reply)) as events:
            async for data in events:
                now = time.perf_counter()
                chunk = _chunk_of(data)
                if chunk.choices is None:
                    raise BenchError(bytes(chunk.error or data).decode())
                for choice in chunk.choices:
                    for _ in choice.token_ids or ():
                        yield now


async def event_data(reply: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Give what each server-sent event of a response says, but for the [DONE] at the end."""
    held = b""
    async for part in reply.aiter_raw():
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                yield line[6:]
