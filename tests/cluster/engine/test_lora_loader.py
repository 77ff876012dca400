"""Loads beside the steps: some steps apart, all at once when nobody would notice, looked ahead."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Any, cast

import pytest

from cluster.engine.dispatcher import Dispatcher
from cluster.engine.executor import Executor
from cluster.engine.lora_loader import STEPS_PER_LOAD, LoadLimits, LoraLoader
from cluster.engine.server import RouterConnection
from cluster.engine.status import EngineStatus
from cluster.errors import ErrorInfo, NotFound, Unavailable
from cluster.messages import (
    Allow,
    Events,
    KeepPinned,
    Unload,
    Unloaded,
)
from cluster.request import BASE, TokenEvent, compose
from cluster.scheduler.scheduler import Scheduler
from cluster.scheduler.stats import AdapterLoad, UnloadedAdapter
from tests.cluster.engine.small_engine import ask, expected, token_ids, until_ready, world_with
from tests.patience import PATIENCE


class Decisions:
    """What a scheduler has decided, as far as the loader asks."""

    def __init__(self) -> None:
        self.loads: list[AdapterLoad] = []
        self.unloaded: list[UnloadedAdapter] = []
        self.waiting: tuple[str, ...] = ()
        self.ready: list[str] = []
        self.failed: list[str] = []

    def take_loads(self) -> list[AdapterLoad]:
        loads, self.loads = self.loads, []
        return loads

    def take_unloaded(self) -> list[UnloadedAdapter]:
        unloaded, self.unloaded = self.unloaded, []
        return unloaded

    def upcoming(self) -> tuple[str, ...]:
        return self.waiting

    def unload(self, adapter: str, *, force: bool) -> list[Any]:
        return []

    def adapter_ready(self, adapter: str) -> None:
        self.ready.append(adapter)

    def adapter_failed(self, adapter: str, error: ErrorInfo) -> list[Any]:
        self.failed.append(adapter)
        return []


class FakeExecutor:
    """An executor that writes down its calls, and clears slots when it may."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, str]] = []
        self.may_clear = asyncio.Event()
        self.may_clear.set()

    def clear_slots(self, places: Iterable[tuple[int, str]]) -> Awaitable[Any]:
        self.calls += [("clear", slot, adapter) for slot, adapter in places]
        return asyncio.ensure_future(self.may_clear.wait())

    async def load_adapter(self, slot: int, adapter: str, parts: Any) -> tuple[int, ...]:
        self.calls.append(("load", slot, adapter))
        return (7, 9)


class Pool:
    """Has everything at once, but for what is missing."""

    def __init__(self) -> None:
        self.prefetched: list[str] = []

    async def shards(self, adapter: str) -> tuple[tuple[Any, ...], ...]:
        if adapter == "missing":
            raise NotFound("there is no such directory")
        return ((adapter,),)

    async def prefetch(self, adapter: str) -> None:
        self.prefetched.append(adapter)
        if adapter == "missing":
            raise NotFound("there is no such directory")


class Setup:
    """A loader and everything around it."""

    def __init__(self) -> None:
        self.decisions, self.ranks, self.pool = Decisions(), FakeExecutor(), Pool()
        self.remake_loader(LoadLimits())

    def remake_loader(self, limits: LoadLimits) -> None:
        """Replace the loader by one of the pool as it is now."""
        status = EngineStatus("0", lambda: 0.0)
        dispatcher = Dispatcher(None, 4, status, lambda: None)
        self.loader = LoraLoader(
            self.pool, dispatcher, lambda adapter: False, lambda: None, status.metrics, limits
        )

    async def run(self, *, is_stepping: bool, begins_step: bool | None = None) -> None:
        """Let the loader do its work once, and all that follows."""
        begins = is_stepping if begins_step is None else begins_step
        group, scheduler = cast(Executor, self.ranks), cast(Scheduler, self.decisions)
        self.loader.run_pending(group, scheduler, begins_step=begins, is_stepping=is_stepping)
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    """Return a loader that is reset in the end."""
    made = Setup()
    yield made
    made.loader.reset()


async def test_while_the_ranks_step_loads_begin_some_steps_apart(setup: Setup) -> None:
    setup.decisions.loads = [AdapterLoad(name, slot) for slot, name in enumerate("ABC")]
    begun = []
    for _ in range(3 * STEPS_PER_LOAD):
        await setup.run(is_stepping=True)
        begun.append(len(setup.ranks.calls))
    assert begun == [1] * STEPS_PER_LOAD + [2] * STEPS_PER_LOAD + [3] * STEPS_PER_LOAD
    assert setup.decisions.ready == ["A", "B", "C"]
    assert setup.loader.held[2] == ("C", 9)


async def test_a_look_that_begins_no_step_brings_no_load_nearer(setup: Setup) -> None:
    setup.decisions.loads = [AdapterLoad(name, slot) for slot, name in enumerate("AB")]
    for _ in range(3 * STEPS_PER_LOAD):
        await setup.run(is_stepping=True, begins_step=False)
    assert len(setup.ranks.calls) <= 1


async def test_when_nothing_runs_all_loads_begin_at_once(setup: Setup) -> None:
    setup.decisions.loads = [AdapterLoad(name, slot) for slot, name in enumerate("ABC")]
    await setup.run(is_stepping=True)
    await setup.run(is_stepping=False)
    assert setup.decisions.ready == ["A", "B", "C"]


async def test_slots_are_cleared_before_the_load_that_needs_their_memory(setup: Setup) -> None:
    setup.decisions.loads = [AdapterLoad("A", 0), AdapterLoad("B", 1, ((0, "A"), (1, "X")))]
    await setup.run(is_stepping=False)
    assert setup.ranks.calls == [
        ("clear", 0, "A"),
        ("clear", 1, "X"),
        ("load", 0, "A"),
        ("load", 1, "B"),
    ]


async def test_a_load_that_fails_before_the_ranks_hear_of_it_leaves_nothing_in_its_slot(
    setup: Setup,
) -> None:
    setup.decisions.loads = [AdapterLoad("missing", 1, replaces="A")]
    await setup.run(is_stepping=False)
    assert setup.ranks.calls == [("clear", 1, "missing"), ("clear", 1, "A")]


async def test_an_unload_is_answered_when_the_ranks_have_cleared_its_slots(setup: Setup) -> None:
    answers: list[Unloaded] = []

    class Connection:
        send = staticmethod(answers.append)

    scheduler = cast(Scheduler, setup.decisions)
    connection = cast(RouterConnection, Connection())
    setup.loader.unload(scheduler, connection, 5, "A", False)
    setup.ranks.may_clear.clear()
    setup.decisions.unloaded = [UnloadedAdapter("A", 12, ((3, "A"), (4, "A:2.0")))]
    await setup.run(is_stepping=True)
    assert (setup.ranks.calls, answers) == ([("clear", 3, "A"), ("clear", 4, "A:2.0")], [])
    setup.ranks.may_clear.set()
    await setup.run(is_stepping=True)
    assert answers == [Unloaded(5, freed_pages=12, freed_slots=(3, 4))]


async def test_what_waits_for_a_slot_is_fetched_once_and_in_order(setup: Setup) -> None:
    setup.decisions.waiting = ("A", "missing", "B")
    await setup.run(is_stepping=True)
    setup.decisions.waiting = ("missing", "B", "C")
    await setup.run(is_stepping=True)
    assert setup.pool.prefetched == ["A", "missing", "B", "C"]
    setup.decisions.waiting = ()
    await setup.run(is_stepping=True)
    setup.decisions.waiting = ("A",)  # it may have left host memory since
    await setup.run(is_stepping=True)
    assert setup.pool.prefetched == ["A", "missing", "B", "C", "A"]


async def test_what_has_not_begun_ends_with_the_ranks(setup: Setup) -> None:
    setup.decisions.loads = [AdapterLoad(name, slot) for slot, name in enumerate("AB")]
    await setup.run(is_stepping=True)
    setup.loader.reset()
    await setup.run(is_stepping=False)
    assert [adapter for _, _, adapter in setup.ranks.calls] == ["A"]


async def test_an_adapter_that_is_gone_fails_only_its_own_requests() -> None:
    async with world_with("cafe") as world:
        router = await world.connect()
        await until_ready(router)
        for request_id, adapter in (("gone", "dead"), ("here", "cafe"), ("base", BASE)):
            router.send(ask(request_id, adapter))
        events = await router.collect("gone", "here", "base")
        assert events["gone"][-1].error is not None
        assert events["gone"][-1].error.name == "NotFound"
        assert token_ids(events["here"]) == expected("cafe")
        assert token_ids(events["base"]) == expected()


async def test_an_adapter_that_a_rank_cannot_compute_fails_only_its_own_requests() -> None:
    async with world_with("cafe", "odd") as world:
        router = await world.connect()
        await until_ready(router)
        for request_id, adapter in (("a", "odd"), ("b", "odd"), ("here", "cafe"), ("base", BASE)):
            router.send(ask(request_id, adapter))
        events = await router.collect("a", "b", "here", "base")
        for name in ("a", "b"):
            error = events[name][-1].error
            assert error is not None and error.name == "InvalidAdapter"
            assert "divides by zero" in error.message
        assert token_ids(events["here"]) == expected("cafe")
        assert (await router.status()).engine.restarts == 0
        assert [slot.adapter for slot in (await router.status()).scheduler.slots] == ["cafe"]


async def test_a_sum_of_adapters_is_served_from_the_shards_of_its_parts() -> None:
    both = compose([("cafe", 0.5), ("fade", -1.0)])
    async with world_with("cafe", "fade") as world:
        router = await world.connect()
        await until_ready(router)
        for request_id, adapter in (("sum", both), ("one", "cafe")):
            router.send(ask(request_id, adapter))
        events = await router.collect("sum", "one")
        assert token_ids(events["sum"]) == expected(both) != expected("cafe")
        assert token_ids(events["one"]) == expected("cafe")


async def test_the_log_of_a_rank_that_died_of_a_load_keeps_no_shards(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world_with("deadly") as world:
        router = await world.connect()
        await until_ready(router)
        router.send(ask("x", "deadly"))
        await router.collect("x")
    logged = [record for record in caplog.records if "restarting" in record.message]
    assert {type(one.args[0]) for one in logged if one.args} == {str}, "it keeps shards alive"


class Trouble:
    """What goes wrong at one of the awaits of a load, the first so many times."""

    def __init__(self, error: Exception | None, times: int) -> None:
        self._error = error  # None: it never returns
        self._left = times

    async def strike(self) -> None:
        """Raise or hang, if there is trouble left."""
        if self._left:
            self._left -= 1
            if self._error is None:
                await asyncio.Event().wait()
            else:
                raise self._error


class TroubledPool(Pool):
    def __init__(self, trouble: Trouble) -> None:
        super().__init__()
        self._trouble = trouble

    async def shards(self, adapter: str) -> tuple[tuple[Any, ...], ...]:
        await self._trouble.strike()
        return await super().shards(adapter)


class TroubledExecutor(FakeExecutor):
    def __init__(self, trouble: Trouble) -> None:
        super().__init__()
        self._trouble = trouble

    async def load_adapter(self, slot: int, adapter: str, parts: Any) -> tuple[int, ...]:
        await self._trouble.strike()
        return await super().load_adapter(slot, adapter, parts)


ERRORS = {
    "hang": None,
    "away": Unavailable("the pool restarts"),
    "gone": NotFound("no directory has it"),
    "bug": ZeroDivisionError("a bug"),
    "memory": MemoryError(),
}
COME_BACK = {"hang", "away"}


@pytest.mark.parametrize("times", [1, 1000])
@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("where", ["pool", "ranks"])
async def test_a_load_ends_whatever_happens_at_its_awaits(
    where: str, name: str, times: int
) -> None:
    setup, trouble = Setup(), Trouble(ERRORS[name], times)
    if where == "pool":
        setup.pool = TroubledPool(trouble)
    else:
        setup.ranks = TroubledExecutor(trouble)
    limits = LoadLimits(fetch=0.02, load=0.02, retry=0.2, retry_delay=0.01)
    setup.remake_loader(limits)
    setup.decisions.loads = [AdapterLoad("A", 0)]
    await setup.run(is_stepping=True)
    async with asyncio.timeout(PATIENCE):
        while setup.loader._background:
            await asyncio.sleep(0.01)
    is_served = name in COME_BACK and times == 1
    assert (setup.decisions.ready, setup.decisions.failed) == (
        (["A"], []) if is_served else ([], ["A"])
    )
    assert setup.loader.loading == {}
    setup.loader.reset()


async def test_unload_waits_for_running_requests_and_then_answers() -> None:
    async with world_with("cafe") as world:
        router = await world.connect()
        await until_ready(router)
        router.send(ask("x", "cafe", n=20))
        await router.receive()
        router.send(Unload(3, "cafe"))
        order = []
        while len(order) < 2:
            message = await router.receive()
            if isinstance(message, Unloaded):
                assert message.call_id == 3
                order.append("unloaded")
            elif isinstance(message, Events):
                order += ["end" for e in message.events if e.finish_reason is not None]
        assert order == ["end", "unloaded"]
        status = await router.status()
        assert status.scheduler.slots == ()
        assert status.scheduler.cached_pages == 0


async def test_a_forced_unload_ends_running_requests_with_the_reason() -> None:
    async with world_with("cafe") as world:
        router = await world.connect()
        await until_ready(router)
        router.send(ask("x", "cafe", n=20))
        await router.receive()
        router.send(Unload(3, "cafe", force=True))
        events = await router.collect("x")
        assert [e.error.name for e in events["x"] if e.error] == ["NotFound"]
        while not isinstance(await router.receive(), Unloaded):
            pass
        assert (await router.status()).scheduler.slots == ()


async def test_an_unload_that_waits_can_be_taken_back() -> None:
    async with world_with("cafe") as world:
        router = await world.connect()
        await until_ready(router)
        router.send(ask("x", "cafe", n=20))
        await router.receive()
        router.send(Unload(3, "cafe"))
        router.send(Allow("cafe"))
        router.send(ask("y", "cafe"))
        answers: list[Unloaded] = []
        events: dict[str, list[TokenEvent]] = {"x": [], "y": []}
        while not answers or not all(e and e[-1].finish_reason for e in events.values()):
            message = await router.receive()
            if isinstance(message, Unloaded):
                answers.append(message)
            elif isinstance(message, Events):
                for event in message.events:
                    events[event.request_id].append(event)
        assert answers == [Unloaded(3, freed_pages=0, freed_slots=())]
        assert token_ids(events["y"]) == expected("cafe")


async def test_pins_outlive_the_ranks() -> None:
    async with world_with("cafe", "beef") as world:
        router = await world.connect()
        router.send(KeepPinned({"cafe": 100}))
        await until_ready(router)
        for life in range(2):
            router.send(ask(f"a{life}", "cafe"))
            router.send(ask(f"b{life}", "beef"))
            await router.collect(f"a{life}", f"b{life}")
            pinned = {slot.adapter: slot.pinned for slot in (await router.status()).scheduler.slots}
            assert pinned == {"cafe": True, "beef": False}
            if life == 0:
                world.launcher.handles[1].rank.fails = True
                router.send(ask("c"))
                await router.collect("c")
                await until_ready(router)
        router.send(KeepPinned({}))
        router.send(ask("d"))
        await router.collect("d")
        assert not any(slot.pinned for slot in (await router.status()).scheduler.slots)
