"""How a router notices that a scheduler is lost, and gets its connection back."""

import asyncio
from dataclasses import replace

import pytest

from cluster.errors import Unavailable
from cluster.messages import SchedulerAddress
from cluster.router.config import RouterConfig
from cluster.router.event_queue import EventQueue
from cluster.router.replica_set import SILENT_PARTS, ReplicaSet
from cluster.router.testing.fake_backend import FakeBackend
from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from tests.cluster.router.test_replica_set import CONFIG, all_events, close, end, request
from tests.patience import PATIENCE


async def test_a_replica_that_accepts_but_says_nothing_is_not_connected() -> None:
    fake = FakeScheduler()
    fake.is_hung = True
    backend = FakeBackend(await fake.start())
    schedulers = ReplicaSet(backend, replace(CONFIG, health_timeout=0.05))
    await schedulers.refresh()
    assert schedulers.clients == ()
    await fake.wait_until(lambda fake: fake.num_routers == 0)
    fake.is_hung = False
    schedulers = ReplicaSet(backend, CONFIG)
    await schedulers.refresh()
    assert len(schedulers.clients) == 1
    await close(schedulers, fake)


def test_a_stopped_scheduler_is_noticed_within_five_seconds() -> None:
    config = RouterConfig(
        model_name="m", model_dir="", context_length=64, vocab_size=256, eos_token_ids=()
    )
    asked_after = config.refresh_interval
    part = config.scheduler_timeout / SILENT_PARTS  # in which its last sign of life was heard
    assert asked_after + config.scheduler_timeout + part <= 5


async def test_a_replica_is_silent_only_if_it_sends_no_events_either() -> None:
    fake = FakeScheduler(step_seconds=0.01)
    config = replace(CONFIG, scheduler_timeout=0.1)
    schedulers = ReplicaSet(FakeBackend(await fake.start()), config)
    await schedulers.refresh()
    (client,) = schedulers.clients
    running = asyncio.create_task(schedulers.run())
    fake.answers_calls = False
    client.submit((request("r", max_tokens=100_000),), EventQueue())
    async with asyncio.timeout(PATIENCE):
        num_frames = client.num_frames
        while client.num_frames < num_frames + 100:
            await asyncio.sleep(0.001)
        assert not client.closed
        fake.is_hung = True
        while not client.closed:
            await asyncio.sleep(0.001)
    assert client.loss_reason == "hung"
    await end(running)
    await close(schedulers, fake)


async def test_why_a_connection_was_lost_first_stays_the_reason() -> None:
    fake = FakeScheduler()
    schedulers = ReplicaSet(FakeBackend(await fake.start()), CONFIG)
    await schedulers.refresh()
    (client,) = schedulers.clients
    client.close("silent", is_hung=True)
    await schedulers.refresh()  # which lets go of what is closed
    assert client.loss_reason == "hung"
    await close(schedulers, fake)


async def test_connections_are_made_again_while_the_pool_is_away() -> None:
    fake = FakeScheduler(lambda _: Script(dies_after=1))
    backend = FakeBackend(await fake.start())
    schedulers = ReplicaSet(backend, CONFIG)
    await schedulers.refresh()
    queue = EventQueue()
    schedulers.clients[0].submit((request("r"),), queue)
    await all_events(queue)
    assert schedulers.clients == ()

    async def away() -> tuple[SchedulerAddress, ...]:
        raise Unavailable("the adapter pool is down")

    backend.schedulers = away  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="the adapter pool is down"):
        await schedulers.refresh()
    assert len(schedulers.clients) == 1
    await close(schedulers, fake)
