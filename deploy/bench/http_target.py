"""A server with OpenAI's completions API as the target of a workload."""

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator

import httpx

from deploy.bench.measure import Run, Sample
from deploy.bench.workload import Ask, Workload


class BenchError(Exception):
    """The target answered something other than the tokens that were asked for."""


class HttpTarget:
    """Streams completions from a base URL."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.label = "topwork"
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
        limits = httpx.Limits(max_connections=workload.concurrency)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=600.0, limits=limits, headers=self._headers
        ) as client:

            async def one_client() -> None:
                while waiting:
                    samples.append(await self._ask(client, waiting.popleft()))

            await asyncio.gather(*(one_client() for _ in range(workload.concurrency)))
        return Run(tuple(samples))

    async def _ask(self, client: httpx.AsyncClient, ask: Ask) -> Sample:
        sent = time.perf_counter()
        times = [at async for at in token_times(client, ask)]
        if len(times) != ask.num_output_tokens:
            raise BenchError(f"{len(times)} tokens instead of {ask.num_output_tokens}")
        return Sample(sent, tuple(times))


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
        async for line in reply.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now = time.perf_counter()
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise BenchError(str(chunk["error"]))
            for choice in chunk["choices"]:
                for _ in choice.get("token_ids") or ():
                    yield now
