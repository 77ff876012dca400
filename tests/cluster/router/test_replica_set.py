import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from cluster.errors import ErrorInfo, Unavailable
from cluster.messages import SchedulerAddress
from cluster.request import Request, TokenEvent
from cluster.router.config import RouterConfig
from cluster.router.engine_client import EngineClient
from cluster.router.event_queue import EventQueue
from cluster.router.replica_set import ReplicaSet
from cluster.router.testing.fake_backend import FakeBackend
from cluster.router.testing.fake_scheduler import SECRET, FakeScheduler, Script
from tests.patience import PATIENCE
from worker.protocol import SamplingParams

CONFIG = RouterConfig(
    model_name="m", model_dir="", context_length=64, vocab_size=256, eos_token_ids=(),
    refresh_interval=0.01,
)  # fmt: skip


def request(request_id: str, adapter: str = "base", max_tokens: int = 3) -> Request:
    return Request(request_id, adapter, (1, 2), SamplingParams(), max_tokens)


def silent(replica: str) -> FakeScheduler:
    return FakeScheduler(lambda _: Script(is_silent=True), replica=replica)


def test_an_adapter_stays_with_its_replica_until_that_one_is_much_busier() -> None:
    async def scenario() -> None:
        fakes = [silent(str(number)) for number in range(3)]
        backend = FakeBackend(*[await fake.start() for fake in fakes])
        schedulers = ReplicaSet(backend, CONFIG)
        await schedulers.refresh()
        homes = {schedulers.choose(request("", f"adapter {n}")).address.replica for n in range(30)}
        assert homes == {"0", "1", "2"}
        home = schedulers.choose(request("", "x"))
        assert all(schedulers.choose(request("", "x")) is home for _ in range(5))
        queue = EventQueue()
        for number in range(30):
            schedulers.choose(request("", "x")).submit((request(str(number), "x"),), queue)
        loads = sorted(client.num_in_flight for client in schedulers.clients)
        assert sum(loads) == 30
        assert loads[-1] <= 13  # 1.25 of the average, rounded up
        await schedulers.close()
        for fake in fakes:
            await fake.close()

    asyncio.run(scenario())


def test_events_of_a_lost_connection_end_with_unavailable() -> None:
    async def scenario() -> None:
        fake = FakeScheduler(lambda _: Script(dies_after=2))
        schedulers = ReplicaSet(FakeBackend(await fake.start()), CONFIG)
        await schedulers.refresh()
        client = schedulers.choose(request("", "base"))
        queue = EventQueue()
        client.submit((request("r", max_tokens=9),), queue)
        events: list[TokenEvent] = []
        while not events or events[-1].finish_reason is None:
            events += await queue.get()
        assert len(events) == 3
        assert events[-1].error is not None and events[-1].error.name == "Unavailable"
        assert client.closed
        assert schedulers.choose(request("", "base")) is None
        with pytest.raises(Unavailable):
            schedulers.choose_any(request("", "base"))
        with pytest.raises(Unavailable):
            await client.status()
        client.abort("r")  # ended: nothing to do
        await schedulers.refresh()
        assert schedulers.choose(request("", "base")) is not client
        await schedulers.close()
        await fake.close()

    asyncio.run(scenario())


def test_a_replica_that_a_restarted_pool_has_not_heard_of_yet_is_still_used() -> None:
    async def scenario() -> None:
        fake = FakeScheduler()
        backend = FakeBackend(await fake.start())
        schedulers = ReplicaSet(backend, CONFIG)
        await schedulers.refresh()
        client = schedulers.choose(request("", "base"))
        backend.addresses = ()
        await schedulers.refresh()
        assert schedulers.choose(request("", "base")) is client
        assert [report.status is not None for report in await schedulers.reports()] == [True]
        await schedulers.close()
        await fake.close()

    asyncio.run(scenario())


def test_a_scheduler_that_is_not_up_yet_is_found_later() -> None:
    async def scenario() -> None:
        backend = FakeBackend(SchedulerAddress("0", "127.0.0.1", 1, SECRET))
        schedulers = ReplicaSet(backend, CONFIG)
        await schedulers.refresh()
        running = asyncio.create_task(schedulers.run())
        assert [report.status for report in await schedulers.reports()] == [None]
        fake = FakeScheduler()
        backend.addresses = (await fake.start(),)
        async with asyncio.timeout(PATIENCE):
            while not schedulers.clients:
                await asyncio.sleep(0.001)
        assert [client.address for client in schedulers.clients] == [*backend.addresses]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await schedulers.close()
        await fake.close()

    asyncio.run(scenario())


async def sent_to(schedulers: ReplicaSet, asked: Request) -> str:
    """Place a request, run it to its end, and return the replica that had it."""
    client = schedulers.choose(asked)
    queue = EventQueue()
    client.submit((asked,), queue)
    while (await queue.get())[-1].finish_reason is None:
        pass
    return client.address.replica


async def test_a_prompt_goes_where_its_beginning_went_whatever_its_adapters_home() -> None:
    fakes = [FakeScheduler(replica=str(number)) for number in range(3)]
    backend = FakeBackend(*[await fake.start() for fake in fakes])
    schedulers = ReplicaSet(backend, replace(CONFIG, page_size=2))
    await schedulers.refresh()
    home = await sent_to(schedulers, Request("1", "x", (1,), SamplingParams(), 1))
    # The home is busy once, so that another replica gets a prompt of the same adapter.
    busy = next(client for client in schedulers.clients if client.address.replica == home)
    held = Request("held", "x", (9,), SamplingParams(), 10_000)
    busy.submit((held, again(held, "2"), again(held, "3")), EventQueue())
    other = await sent_to(schedulers, Request("4", "x", (5, 6, 7, 8, 9), SamplingParams(), 1))
    assert other != home
    for name in ("held", "2", "3"):
        busy.abort(name)
    for number in range(3):
        longer = Request(f"l{number}", "x", (5, 6, 7, 8, number), SamplingParams(), 1)
        assert await sent_to(schedulers, longer) == other
        assert await sent_to(schedulers, again(longer, f"s{number}", salt="s")) == home
    await close(schedulers, *fakes)


async def test_an_adapter_goes_where_it_is_in_a_slot() -> None:
    fakes = [silent(str(number)) for number in range(3)]
    schedulers = ReplicaSet(FakeBackend(*[await fake.start() for fake in fakes]), CONFIG)
    await schedulers.refresh()
    home = schedulers.choose(request("", "x"))
    elsewhere = next(client for client in schedulers.clients if client is not home)
    elsewhere.submit((request("1", "x"),), EventQueue())
    # The others have as much to do, so that load decides nothing.
    for client in schedulers.clients:
        if client is not elsewhere:
            client.submit((request(f"b{client.address.replica}"),), EventQueue())
        await client.status()
    assert schedulers.choose(request("", "x")) is elsewhere
    await close(schedulers, *fakes)


async def all_events(queue: EventQueue) -> list[TokenEvent]:
    """Return the events of one request up to its last."""
    events: list[TokenEvent] = []
    while not events or events[-1].finish_reason is None:
        events += await queue.get()
    return events


def replica_of(client: EngineClient) -> str:
    return client.address.replica


async def test_a_replica_that_leaves_gets_nothing_more_and_its_streams_go_elsewhere() -> None:
    fakes = [FakeScheduler(lambda _: Script(pauses_after=1), replica=name) for name in "ab"]
    schedulers = ReplicaSet(FakeBackend(*[await fake.start() for fake in fakes]), CONFIG)
    running = asyncio.create_task(schedulers.run())
    for fake in fakes:
        await fake.wait_until(lambda fake: fake.num_routers > 0)
    await schedulers.reports()
    leaving = next(client for client in schedulers.clients if replica_of(client) == "a")
    queue = EventQueue()
    leaving.submit((request("r"),), queue)
    assert len(await queue.get()) == 1
    fakes[0].leave()
    (event,) = await queue.get()
    assert event.error is not None and event.error.name == "Unavailable"
    await fakes[0].wait_until(lambda fake: fake.aborted == ["r"])
    chosen = {replica_of(schedulers.choose(request("", f"adapter {n}"))) for n in range(20)}
    assert chosen == {"b"}
    await fakes[0].wait_until(lambda fake: fake.num_routers == 0)
    await end(running)
    await close(schedulers, *fakes)


async def test_a_lone_replica_that_leaves_keeps_its_streams_and_is_left_at_their_end() -> None:
    fakes = [FakeScheduler(lambda _: Script(pauses_after=1), replica=name) for name in "ab"]
    fakes[1].reason = "the ranks are starting"
    schedulers = ReplicaSet(FakeBackend(*[await fake.start() for fake in fakes]), CONFIG)
    running = asyncio.create_task(schedulers.run())
    for fake in fakes:
        await fake.wait_until(lambda fake: fake.num_routers > 0)
    await schedulers.reports()
    leaving = next(client for client in schedulers.clients if replica_of(client) == "a")
    queue = EventQueue()
    leaving.submit((request("r"),), queue)
    fakes[0].leave()
    async with asyncio.timeout(PATIENCE):
        while not leaving.is_leaving:
            await asyncio.sleep(0)
    assert not leaving.closed
    fakes[0].resume()
    assert (await all_events(queue))[-1].finish_reason == "length"
    await fakes[0].wait_until(lambda fake: fake.num_routers == 0)
    await end(running)
    await close(schedulers, *fakes)


async def test_a_replica_that_answers_unavailable_is_left_alone_until_it_is_ready() -> None:
    error = ErrorInfo("Unavailable", "the ranks are down", retry_after=5)
    fakes = [FakeScheduler(lambda _: Script(error=error), replica=name) for name in "ab"]
    schedulers = ReplicaSet(FakeBackend(*[await fake.start() for fake in fakes]), CONFIG)
    await schedulers.refresh()
    asked = request("r")
    refusing = schedulers.choose(asked)
    queue = EventQueue()
    refusing.submit((asked,), queue)
    await queue.get()
    others = {schedulers.choose(request("", f"adapter {n}")) for n in range(20)}
    assert others == set(schedulers.clients) - {refusing}
    fake = next(one for one in fakes if one.replica == replica_of(refusing))
    fake.reason = "the ranks are being restarted"
    await schedulers.reports()
    assert schedulers.choose(asked) is not refusing
    assert schedulers.choose(asked, others) is None
    fake.reason = ""
    await schedulers.reports()
    assert schedulers.choose(asked) is refusing
    await close(schedulers, *fakes)


async def test_who_waits_is_told_when_a_replica_is_ready_again() -> None:
    fake = FakeScheduler()
    fake.reason, fake.is_starting = "the ranks are starting", True
    schedulers = ReplicaSet(FakeBackend(await fake.start()), CONFIG)
    await schedulers.refresh()
    asked, told = request("r"), asyncio.Event()
    assert schedulers.choose(asked) is None
    assert schedulers.choose_any(asked)  # which says what keeps it
    schedulers.add_listener(told.set)
    await schedulers.reports()
    assert not told.is_set()
    fake.reason = ""
    await schedulers.reports()
    assert told.is_set()
    assert schedulers.choose(asked) is not None
    told.clear()
    schedulers.remove_listener(told.set)
    fake.reason = "on fire"
    await schedulers.reports()
    assert not told.is_set()
    await close(schedulers, fake)


async def test_ranks_that_are_down_are_passed_over_while_others_are_up() -> None:
    fakes = [FakeScheduler(replica=name) for name in "ab"]
    fakes[0].reason = "the ranks are starting"
    schedulers = ReplicaSet(FakeBackend(*[await fake.start() for fake in fakes]), CONFIG)
    await schedulers.refresh()
    await schedulers.reports()
    chosen = {schedulers.choose(request("", f"adapter {n}")).address.replica for n in range(20)}
    assert chosen == {"b"}
    fakes[1].reason = "on fire"
    await schedulers.reports()  # then it is better to hear why
    chosen = {schedulers.choose(request("", f"adapter {n}")).address.replica for n in range(20)}
    assert chosen == {"a", "b"}
    await close(schedulers, *fakes)


def again(one: Request, request_id: str, salt: str = "") -> Request:
    return structs.replace(one, request_id=request_id, cache_salt=salt)


async def end(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def close(schedulers: ReplicaSet, *fakes: FakeScheduler) -> None:
    await schedulers.close()
    for fake in fakes:
        await fake.close()
