"""Names that nobody has loaded: one question at a time for all, and never an old answer."""

import asyncio

import pytest

from cluster.errors import NotFound, Overloaded, Unavailable
from cluster.router import absent_names
from cluster.router.absent_names import AbsentNames
from cluster.router.model_resolver import ModelResolver
from cluster.router.tenancy.principal import ANYONE
from cluster.router.testing.fake_backend import FakeBackend


class Pool:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.asked: list[tuple[str, ...]] = []
        self.gate = asyncio.Event()

    async def absent(self, names: tuple[str, ...]) -> frozenset[str]:
        self.asked.append(names)
        found = frozenset(names) - self.names
        await self.gate.wait()
        return found


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_all_names_that_come_while_one_question_is_on_its_way_make_one_more() -> None:
    pool = Pool()
    names = AbsentNames(pool.absent)
    first = asyncio.create_task(names.is_absent("a"))
    await turns()
    others = [asyncio.create_task(names.is_absent(f"n{n % 50}")) for n in range(500)]
    await turns()
    pool.gate.set()
    assert await asyncio.gather(first, *others) == [True] * 501
    assert [len(asked) for asked in pool.asked] == [1, 50]


async def test_a_name_that_is_loaded_while_a_question_is_on_its_way_is_found_by_the_next() -> None:
    pool = Pool()
    names = AbsentNames(pool.absent)
    early = asyncio.create_task(names.is_absent("a"))
    await turns()
    pool.names.add("a")
    late = asyncio.create_task(names.is_absent("a"))
    await turns()
    pool.gate.set()
    assert (await early, await late) == (True, False)


async def test_who_goes_takes_nobody_elses_answer_along() -> None:
    pool = Pool()
    names = AbsentNames(pool.absent)
    waiting = [asyncio.create_task(names.is_absent("a")) for _ in range(3)]
    await turns()
    waiting[0].cancel()
    pool.gate.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError) and results[1:] == [True, True]


async def test_a_pool_that_is_away_fails_all_who_asked_and_the_next_one_is_asked_again() -> None:
    is_away = True

    async def ask(asked: tuple[str, ...]) -> frozenset[str]:
        if is_away:
            raise Unavailable("the adapter pool is down")
        return frozenset(asked)

    names = AbsentNames(ask)
    failed = await asyncio.gather(*(names.is_absent("a") for _ in range(3)), return_exceptions=True)
    assert [type(one) for one in failed] == [Unavailable] * 3
    is_away = False
    assert await names.is_absent("a")


async def test_names_in_one_question_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent_names, "MAX_ASKED", 2)
    pool = Pool()
    names = AbsentNames(pool.absent)
    waiting = [asyncio.create_task(names.is_absent("a"))]
    await turns()
    waiting += [asyncio.create_task(names.is_absent(name)) for name in "bc"]
    await turns()
    with pytest.raises(Overloaded):
        await names.is_absent("d")
    pool.gate.set()
    assert await asyncio.gather(*waiting) == [True] * 3


async def test_names_that_were_found_are_bounded_and_cost_no_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(absent_names, "MAX_FOUND", 2)
    pool = Pool()
    pool.gate.set()
    names = AbsentNames(pool.absent)
    for name in "abc":
        names.found(name)
    assert not await names.is_absent("b") and not await names.is_absent("c")
    assert pool.asked == []
    assert await names.is_absent("a")
    assert await names.is_absent("x" * 10_000)
    assert pool.asked == [("a",)]


async def test_a_flood_of_unknown_names_resolves_nothing() -> None:
    backend = FakeBackend()
    models = ModelResolver("base", backend)
    calls = (models.resolve(f"none{n % 7}", None, ANYONE, f"r{n}") for n in range(200))
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(one) for one in results} == {NotFound}
    assert backend.resolved == [] and len(backend.asked) <= 2


async def test_an_adapter_is_found_right_after_it_is_loaded_and_lost_when_it_is_not() -> None:
    backend = FakeBackend()
    models = ModelResolver("base", backend)
    for _ in range(2):
        with pytest.raises(NotFound):
            await models.resolve("pirate", None, ANYONE, "r")
        await backend.load("pirate", "/adapters/pirate", False, False)
        assert (await models.resolve("pirate", None, ANYONE, "r")).names == ("pirate",)
        await models.resolve("pirate", None, ANYONE, "r")
        await backend.unload("pirate", False)
    assert backend.asked == [("pirate",), ("pirate",), ("pirate",)]
