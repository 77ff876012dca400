import asyncio

import pytest

from cluster.errors import Unavailable
from cluster.request import Request, TokenEvent
from cluster.router.config import RouterConfig
from cluster.router.fake_backend import FakeBackend
from cluster.router.fake_scheduler import SECRET, FakeScheduler, Script
from cluster.router.mailbox import Mailbox
from cluster.router.schedulers import Schedulers
from cluster.wire import SchedulerAddress
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
        schedulers = Schedulers(backend, CONFIG)
        await schedulers.refresh()
        homes = {schedulers.choose(request("", f"adapter {n}")).address.replica for n in range(30)}
        assert homes == {"0", "1", "2"}
        home = schedulers.choose(request("", "x"))
        assert all(schedulers.choose(request("", "x")) is home for _ in range(5))
        mailbox = Mailbox()
        for number in range(30):
            schedulers.choose(request("", "x")).submit((request(str(number), "x"),), mailbox)
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
        schedulers = Schedulers(FakeBackend(await fake.start()), CONFIG)
        await schedulers.refresh()
        client = schedulers.choose(request("", "base"))
        mailbox = Mailbox()
        client.submit((request("r", max_tokens=9),), mailbox)
        events: list[TokenEvent] = []
        while not events or events[-1].finish_reason is None:
            events += await mailbox.receive()
        assert len(events) == 3
        assert events[-1].error is not None and events[-1].error.name == "Unavailable"
        assert client.closed
        with pytest.raises(Unavailable):
            schedulers.choose(request("", "base"))
        with pytest.raises(Unavailable):
            await client.status()
        client.abort("r")  # ended: nothing to do
        await schedulers.refresh()
        assert schedulers.choose(request("", "base")) is not client
        await schedulers.close()
        await fake.close()

    asyncio.run(scenario())


def test_a_replica_that_is_not_listed_any_more_ends_its_requests_first() -> None:
    async def scenario() -> None:
        fake = FakeScheduler(lambda _: Script(pauses_after=3))
        backend = FakeBackend(await fake.start())
        schedulers = Schedulers(backend, CONFIG)
        await schedulers.refresh()
        client = schedulers.choose(request("", "base"))
        mailbox = Mailbox()
        client.submit((request("r", max_tokens=10),), mailbox)
        backend.addresses = ()
        await schedulers.refresh()
        assert schedulers.clients == ()
        fake.resume()
        events: list[TokenEvent] = []
        while not events or events[-1].finish_reason is None:
            events += await mailbox.receive()
        assert events[-1].finish_reason == "length"
        await schedulers.refresh()
        assert client.closed
        await client.wait_closed()
        await schedulers.close()
        await fake.close()

    asyncio.run(scenario())


def test_a_scheduler_that_is_not_up_yet_is_found_later() -> None:
    async def scenario() -> None:
        backend = FakeBackend(SchedulerAddress("0", "127.0.0.1", 1, SECRET))
        schedulers = Schedulers(backend, CONFIG)
        await schedulers.refresh()
        running = asyncio.create_task(schedulers.run())
        assert [report.status for report in await schedulers.reports()] == [None]
        fake = FakeScheduler()
        backend.addresses = (await fake.start(),)
        await fake.wait_until(lambda fake: fake.num_routers > 0)
        assert [client.address for client in schedulers.clients] == [*backend.addresses]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await schedulers.close()
        await fake.close()

    asyncio.run(scenario())
