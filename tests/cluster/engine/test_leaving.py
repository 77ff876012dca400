"""An engine that has to go, as its routers see it."""

import asyncio

import pytest

from cluster.errors import Unavailable
from cluster.request import Request
from cluster.router.engine_client import EngineClient
from cluster.router.event_queue import EventQueue
from tests.cluster.engine.small_engine import World, world_with
from worker.protocol import SamplingParams


async def connected(world: World) -> EngineClient:
    client = await EngineClient.connect(world.address, lambda: None)
    while not (await client.status()).ready:
        await asyncio.sleep(0.01)
    return client


async def test_a_drain_ends_when_the_last_router_has_its_answers_and_has_hung_up() -> None:
    async with world_with() as world:
        client, idle = await connected(world), await connected(world)
        queue = EventQueue()
        request = Request("a", "base", (3, 4, 5), SamplingParams(), max_tokens=40)
        client.submit((request,), queue)
        draining = asyncio.create_task(world.engine.drain(20.0))
        while not (client.is_leaving and idle.is_leaving):
            await asyncio.sleep(0.01)
        # One that was on its way is served, too.
        late = Request("late", "base", (3, 4, 5), SamplingParams(), max_tokens=3)
        idle.submit((late,), queue)
        with pytest.raises(OSError):
            await EngineClient.connect(world.address, lambda: None)
        reasons: dict[str, str | None] = {}
        while len(reasons) < 2:
            reasons |= {e.request_id: e.finish_reason for e in await queue.get() if e.finish_reason}
        assert reasons == {"a": "length", "late": "length"}
        assert not draining.done()
        client.close("it leaves")
        idle.close("it leaves")
        assert await draining == 0


async def test_a_drain_tells_how_many_requests_did_not_end_in_time() -> None:
    async with world_with() as world:
        client = await connected(world)
        world.launcher.handles[0].rank.hangs.set()
        request = Request("a", "base", (3, 4, 5), SamplingParams(), max_tokens=40)
        client.submit((request,), EventQueue())
        await client.status()  # it has been taken in
        assert await world.engine.drain(0.05) == 1
        world.launcher.handles[0].rank.freed.set()
        client.close("done")


async def test_ranks_that_come_up_are_waited_for_and_a_failed_start_is_told() -> None:
    async with world_with() as world:
        await world.engine.wait_until_up()
    async with world_with(start_timeout=0.05, open_gate=False) as world:
        with pytest.raises(Unavailable, match="did not start in 0.05 s"):
            await world.engine.wait_until_up()
