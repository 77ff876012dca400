"""Loads beside the steps: some steps apart, all at once when nobody would notice, looked ahead."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Any, cast

import pytest

from cluster.engine.dispatcher import Dispatcher
from cluster.engine.executor import Executor
from cluster.engine.lora_loader import STEPS_PER_LOAD, LoraLoader
from cluster.engine.metrics import EngineMetrics
from cluster.engine.server import RouterConnection
from cluster.errors import NotFound
from cluster.messages import Unloaded
from cluster.request import ErrorInfo
from cluster.scheduler.replay.recorder import AnyScheduler
from cluster.scheduler.stats import AdapterLoad, UnloadedAdapter


class Decisions:
    """What a scheduler has decided, as far as the desk asks."""

    def __init__(self) -> None:
        self.loads: list[AdapterLoad] = []
        self.unloaded: list[UnloadedAdapter] = []
        self.line: tuple[str, ...] = ()
        self.ready: list[str] = []

    def take_loads(self) -> list[AdapterLoad]:
        loads, self.loads = self.loads, []
        return loads

    def take_unloaded(self) -> list[UnloadedAdapter]:
        unloaded, self.unloaded = self.unloaded, []
        return unloaded

    def upcoming(self) -> tuple[str, ...]:
        return self.line

    def unload(self, adapter: str, *, force: bool) -> list[Any]:
        return []

    def adapter_ready(self, adapter: str) -> None:
        self.ready.append(adapter)

    def adapter_failed(self, adapter: str, error: ErrorInfo) -> list[Any]:
        return []


class Ranks:
    """A group that writes down what it is told, and clears slots when it may."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, str]] = []
        self.may_clear = asyncio.Event()
        self.may_clear.set()

    def clear_slots(self, places: Iterable[tuple[int, str]]) -> Awaitable[Any]:
        self.told += [("clear", slot, adapter) for slot, adapter in places]
        return asyncio.ensure_future(self.may_clear.wait())

    async def load_adapter(self, slot: int, adapter: str, parts: Any) -> tuple[int, ...]:
        self.told.append(("load", slot, adapter))
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


class Office:
    """A desk and everyone around it."""

    def __init__(self) -> None:
        self.decisions, self.ranks, self.pool = Decisions(), Ranks(), Pool()
        measures = EngineMetrics(lambda: 0.0)
        self.desk = LoraLoader(
            self.pool, Dispatcher(None, lambda _: None, measures), lambda: None, measures
        )

    async def settle(self, *, is_stepping: bool, begins_step: bool | None = None) -> None:
        """Let the desk do its work once, and all that follows."""
        begins = is_stepping if begins_step is None else begins_step
        group, scheduler = cast(Executor, self.ranks), cast(AnyScheduler, self.decisions)
        self.desk.settle(group, scheduler, begins_step=begins, is_stepping=is_stepping)
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def office() -> AsyncIterator[Office]:
    """Return an office that is closed in the end."""
    made = Office()
    yield made
    made.desk.end()


async def test_while_the_ranks_step_loads_begin_some_steps_apart(office: Office) -> None:
    office.decisions.loads = [AdapterLoad(name, slot) for slot, name in enumerate("ABC")]
    begun = []
    for _ in range(3 * STEPS_PER_LOAD):
        await office.settle(is_stepping=True)
        begun.append(len(office.ranks.told))
    assert begun == [1] * STEPS_PER_LOAD + [2] * STEPS_PER_LOAD + [3] * STEPS_PER_LOAD
    assert office.decisions.ready == ["A", "B", "C"]
    assert office.desk.held[2] == ("C", 9)


async def test_a_look_that_begins_no_step_brings_no_load_nearer(office: Office) -> None:
    office.decisions.loads = [AdapterLoad(name, slot) for slot, name in enumerate("AB")]
    for _ in range(3 * STEPS_PER_LOAD):
        await office.settle(is_stepping=True, begins_step=False)
    assert len(office.ranks.told) <= 1


async def test_when_nothing_runs_all_loads_begin_at_once(office: Office) -> None:
    office.decisions.loads = [AdapterLoad(name, slot) for slot, name in enumerate("ABC")]
    await office.settle(is_stepping=True)
    await office.settle(is_stepping=False)
    assert office.decisions.ready == ["A", "B", "C"]


async def test_slots_are_cleared_before_the_load_that_needs_their_memory(office: Office) -> None:
    office.decisions.loads = [AdapterLoad("A", 0), AdapterLoad("B", 1, ((0, "A"), (1, "X")))]
    await office.settle(is_stepping=False)
    assert office.ranks.told == [
        ("clear", 0, "A"),
        ("clear", 1, "X"),
        ("load", 0, "A"),
        ("load", 1, "B"),
    ]


async def test_a_load_that_fails_before_the_ranks_hear_of_it_leaves_nothing_in_its_slot(
    office: Office,
) -> None:
    office.decisions.loads = [AdapterLoad("missing", 1, replaces="A")]
    await office.settle(is_stepping=False)
    assert office.ranks.told == [("clear", 1, "missing"), ("clear", 1, "A")]


async def test_an_unload_is_answered_when_the_ranks_have_cleared_its_slots(office: Office) -> None:
    answers: list[Unloaded] = []

    class Asker:
        send = staticmethod(answers.append)

    scheduler, asker = cast(AnyScheduler, office.decisions), cast(RouterConnection, Asker())
    office.desk.unload(scheduler, asker, 5, "A", False)
    office.ranks.may_clear.clear()
    office.decisions.unloaded = [UnloadedAdapter("A", 12, ((3, "A"), (4, "A:2.0")))]
    await office.settle(is_stepping=True)
    assert (office.ranks.told, answers) == ([("clear", 3, "A"), ("clear", 4, "A:2.0")], [])
    office.ranks.may_clear.set()
    await office.settle(is_stepping=True)
    assert answers == [Unloaded(5, freed_pages=12, freed_slots=(3, 4))]


async def test_what_stands_in_line_is_fetched_once_and_in_order(office: Office) -> None:
    office.decisions.line = ("A", "missing", "B")
    await office.settle(is_stepping=True)
    office.decisions.line = ("missing", "B", "C")
    await office.settle(is_stepping=True)
    assert office.pool.prefetched == ["A", "missing", "B", "C"]
    office.decisions.line = ()
    await office.settle(is_stepping=True)
    office.decisions.line = ("A",)  # it may have left host memory since
    await office.settle(is_stepping=True)
    assert office.pool.prefetched == ["A", "missing", "B", "C", "A"]


async def test_what_has_not_begun_ends_with_the_ranks(office: Office) -> None:
    office.decisions.loads = [AdapterLoad(name, slot) for slot, name in enumerate("AB")]
    await office.settle(is_stepping=True)
    office.desk.end()
    await office.settle(is_stepping=False)
    assert [adapter for _, _, adapter in office.ranks.told] == ["A"]
