"""deploy.serving.router.running_calls: what a drain waits for, and memory that is given back."""

import asyncio
import os
import subprocess
import sys

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from deploy.config import ServeConfig
from deploy.serving.router.deployment import router_deployment
from deploy.serving.router.running_calls import RETURNING_ALLOCATOR, Calls, CountCalls
from tests.patience import PATIENCE

# Each call makes many small objects of a large body, as a parser does, and one in a thousand stays.
_FLOOD = """
import asyncio, os
from deploy.serving.router import running_calls
from deploy.serving.router.running_calls import Calls, CountCalls

kept = []

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

def parse():
    objects = [{"role": "user", "content": f"{i} hello"} for i in range(200_000)]
    kept.extend([dict(objects[i]) for i in range(0, len(objects), 1000)])
    return resident()

async def app(scope, receive, send):
    await receive()
    peaks.append(await asyncio.to_thread(parse))

async def main():
    calls = Calls()
    served = CountCalls(app, calls)

    async def receive():
        return {"type": "http.request", "body": b"x" * running_calls.LARGE_BODY}

    await asyncio.gather(*[
        served({"type": "http", "method": "POST"}, receive, None) for _ in range(8)
    ])
    await asyncio.sleep(running_calls.QUIET + 0.5)

peaks = []
before = resident()
asyncio.run(main())
print(before, max(peaks), resident())
"""


def test_memory_that_large_bodies_took_is_given_back() -> None:
    environment = {**os.environ, **RETURNING_ALLOCATOR}
    done = subprocess.run(
        [sys.executable, "-c", _FLOOD],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    before, peak, after = map(float, done.stdout.split())  # in MB
    assert peak - before > 150
    assert after - before < 0.1 * (peak - before)


def test_routers_have_an_allocator_that_gives_back() -> None:
    options = router_deployment(ServeConfig(model="m")).ray_actor_options
    assert options is not None
    assert options["runtime_env"]["env_vars"] == RETURNING_ALLOCATOR


@pytest.mark.parametrize(("method", "counted"), [("POST", 1), ("GET", 0)])
async def test_a_call_runs_until_its_last_byte(method: str, counted: int) -> None:
    """Looking at something is no call: whoever follows the cache's events does so for ever."""
    calls, has_begun, may_end = Calls(), asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        has_begun.set()
        await may_end.wait()
        await send({"type": "http.response.body", "body": b"end"})

    transport = httpx.ASGITransport(CountCalls(app, calls))
    async with httpx.AsyncClient(transport=transport) as client:
        asked = asyncio.create_task(client.request(method, "http://router/"))
        await has_begun.wait()
        assert calls.num_running == counted
        may_end.set()
        assert (await asked).content == b"end"
    assert calls.num_running == 0


async def test_a_call_that_fails_is_not_counted_for_ever() -> None:
    calls = Calls()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("a fault")

    async with httpx.AsyncClient(transport=httpx.ASGITransport(CountCalls(app, calls))) as client:
        with pytest.raises(RuntimeError):
            await client.post("http://router/")
    assert calls.num_running == 0
