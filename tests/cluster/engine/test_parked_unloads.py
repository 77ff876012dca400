"""Unloads while a suspect runs alone: no scheduler knows of the streams that are parked behind."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from cluster.engine.dispatcher import MAX_LOSSES, Dispatcher
from cluster.engine.executor import Executor
from cluster.engine.lora_loader import LoraLoader
from cluster.engine.server import RouterConnection
from cluster.engine.status import EngineStatus
from cluster.messages import Events, Unload, Unloaded
from cluster.request import Request, compose
from cluster.scheduler.scheduler import Scheduler
from tests.cluster.engine.small_engine import (
    ask,
    ends_until_unloaded,
    expected,
    token_ids,
    until_ready,
    world_with,
)
from tests.cluster.engine.test_lora_loader import FakeExecutor
from tests.cluster.scheduler.conftest import tiny_config
from worker.protocol import SamplingParams

DEADLY = "deadly"
SUM = compose([("cafe", 0.5), ("fade", 0.5)])


class Pool:
    """Has every adapter at once, but for one that is never there."""

    async def shards(self, adapter: str) -> tuple[tuple[Any, ...], ...]:
        if adapter == DEADLY:
            await asyncio.Event().wait()
        return ((adapter,),)

    async def prefetch(self, adapter: str) -> None:
        """Do nothing."""


class Inbox:
    """The far end of a connection."""

    def __init__(self) -> None:
        self.freed: list[tuple[int, int]] = []  # pages and slots, by answer to an unload
        self.errors: list[tuple[str, str]] = []  # request and error

    def send(self, message: Any) -> None:
        if isinstance(message, Unloaded):
            self.freed.append((message.freed_pages, len(message.freed_slots)))
        elif isinstance(message, Events):
            ends = [(event.request_id, event.error) for event in message.events]
            self.errors += [(request_id, error.name) for request_id, error in ends if error]


class Suspected:
    """What an engine has around its ranks, which were lost in loads of an adapter, again and again.

    Who asked for that adapter is the suspect; `behind`, of another adapter, is parked behind it.
    """

    def __init__(self, adapter: str, timeout: float | None = None, elapsed: float = 0.0) -> None:
        self.inbox = Inbox()
        self._router = cast(RouterConnection, self.inbox)
        self._woken = asyncio.Event()
        status = EngineStatus("0", lambda: 0.0)
        self._dispatcher = Dispatcher(timeout, 4, status, self._woken.set)
        self._loader = LoraLoader(
            Pool(), self._dispatcher, lambda adapter: False, self._woken.set, status.metrics
        )
        self._bring_up()
        self.ask("suspect", DEADLY)
        self.ask("behind", adapter, elapsed)
        for _ in range(MAX_LOSSES):
            self._dispatcher.park((), {DEADLY})
            self._bring_up()

    def _bring_up(self) -> None:
        self._scheduler = Scheduler(tiny_config())
        self._dispatcher.attach(self._scheduler)
        self._loader.repeat_unloads(self._scheduler)

    def ask(self, request_id: str, adapter: str, elapsed: float = 0.0) -> None:
        sampling = SamplingParams()
        request = Request(request_id, adapter, (1, 2, 3), sampling, max_tokens=4, elapsed=elapsed)
        self._dispatcher.submit(self._router, (request,))

    def abort(self, request_id: str) -> None:
        self._dispatcher.abort(self._router, request_id)

    def unload(self, *, force: bool) -> None:
        self._loader.unload(self._scheduler, self._router, 7, "cafe", force)

    def allow(self) -> None:
        self._loader.allow(self._scheduler, "cafe")

    async def look(self) -> None:
        """Do what the step loop does if it was woken, and what follows from that."""
        assert self._woken.is_set(), "nothing wakes the step loop"
        self._woken.clear()
        ranks = cast(Executor, FakeExecutor())
        assert self._scheduler.schedule() is None, "an adapter is there to run with"
        self._loader.run_pending(ranks, self._scheduler, begins_step=False, is_stepping=False)
        for _ in range(10):
            await asyncio.sleep(0)

    def close(self) -> None:
        """End what goes on in the background."""
        self._loader.reset()


@pytest.fixture(params=["cafe", SUM])
async def suspected(request: pytest.FixtureRequest) -> AsyncIterator[Suspected]:
    """Return a suspect, and behind it a stream of the adapter or of a sum with it."""
    made = Suspected(request.param)
    await made.look()
    yield made
    made.close()


async def test_an_unload_that_ranks_are_lost_in_waits_for_who_is_parked_behind_a_suspect() -> None:
    async with world_with("cafe") as world:
        router = await world.connect()
        await until_ready(router)
        world.launcher.poison(13)
        router.send(ask("killer", length=13))
        router.send(ask("a", "cafe"))
        router.send(Unload(5, "cafe"))
        assert await ends_until_unloaded(router) == ["killer", "a"]
        assert token_ids((await router.collect("a"))["a"]) == expected("cafe")


async def test_an_unload_waits_until_who_is_parked_behind_a_suspect_has_gone_on_and_ended(
    suspected: Suspected,
) -> None:
    suspected.unload(force=False)
    await suspected.look()
    assert suspected.inbox.freed == []
    suspected.abort("suspect")
    await suspected.look()
    suspected.ask("late", "cafe")
    assert suspected.inbox.errors == [("late", "NotFound")]
    assert suspected.inbox.freed == [], "one that has gone on is in its way"
    suspected.abort("behind")
    await suspected.look()
    assert suspected.inbox.freed == [(0, 1)]


async def test_an_unload_goes_on_when_nobody_is_parked_behind_a_suspect_any_more(
    suspected: Suspected,
) -> None:
    suspected.unload(force=False)
    await suspected.look()
    suspected.abort("behind")
    await suspected.look()
    await suspected.look()
    assert suspected.inbox.freed == [(0, 0)]


async def test_an_unload_goes_on_when_the_time_of_who_is_parked_behind_a_suspect_is_up() -> None:
    suspected = Suspected("cafe", timeout=1000.0, elapsed=1000.0)
    suspected.unload(force=False)
    await suspected.look()
    assert suspected.inbox.errors == [("behind", "DeadlineExceeded")]
    await suspected.look()
    await suspected.look()
    assert suspected.inbox.freed == [(0, 0)]
    suspected.close()


async def test_a_forced_unload_ends_who_is_parked_behind_a_suspect_at_once(
    suspected: Suspected,
) -> None:
    suspected.ask("other", "beef")
    suspected.unload(force=False)
    suspected.unload(force=True)
    assert suspected.inbox.errors == [("behind", "NotFound")]
    await suspected.look()
    assert suspected.inbox.freed == [(0, 0)] * 2


async def test_an_unload_that_waits_for_who_is_parked_behind_a_suspect_can_be_taken_back(
    suspected: Suspected,
) -> None:
    suspected.unload(force=False)
    await suspected.look()
    assert suspected.inbox.freed == []
    suspected.allow()
    assert suspected.inbox.freed == [(0, 0)]
    suspected.abort("suspect")
    await suspected.look()
    suspected.ask("late", "cafe")
    assert suspected.inbox.errors == []
