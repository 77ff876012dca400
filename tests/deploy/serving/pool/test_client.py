"""The pool as routers call it: one that is replaced is asked no more, and nobody hears of it."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from cluster.errors import NotFound, Replaced, TopworkError, Unavailable
from deploy.serving.pool.client import PoolClient


class Remote:
    """A method as Ray has it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    async def remote(self, *arguments: object) -> Any:
        await asyncio.sleep(0)
        try:
            return self._call(*arguments)
        except TopworkError as error:
            raise RayTaskError("call", "", error) from None


class FakeId(str):
    """An actor's."""

    def hex(self) -> str:
        return self


class FakeActor:
    """A pool that answers as it is told."""

    def __init__(self, name: str, answer: Callable[[], Any]) -> None:
        self._actor_id = FakeId(name)
        self.records = self.drain = self.pin = Remote(lambda *_: answer())


class FakeHandle:
    """Gives each actor in turn, the last one from then on."""

    def __init__(self, *actors: FakeActor) -> None:
        self._actors = list(actors)
        self.lost: list[str] = []
        self.locate = Remote(self._locate)

    def _locate(self, lost: str) -> tuple[str, FakeActor]:
        self.lost.append(lost)
        return "model", self._actors.pop(0) if len(self._actors) > 1 else self._actors[0]


def raising(error: Exception) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it


ENDING = FakeActor("old", raising(Replaced("the adapter pool is replaced", retry_after=1)))


async def test_the_pool_that_replaces_another_is_asked_also_for_what_may_not_be_repeated() -> None:
    handle = FakeHandle(ENDING, FakeActor("new", lambda: ("a record",)))
    client = PoolClient(handle, "model")  # type: ignore[arg-type]
    assert await client.pin("name") == ("a record",)
    assert handle.lost == ["", "old"]
    assert await client.records() == ("a record",)
    assert len(handle.lost) == 2  # it is known now


async def test_until_there_is_one_that_replaces_it_calls_wait() -> None:
    handle = FakeHandle(*[ENDING] * 4, FakeActor("new", lambda: ("a record",)))
    client = PoolClient(handle, "model")  # type: ignore[arg-type]
    found = await asyncio.gather(*(client.records() for _ in range(3)))
    assert found == [("a record",)] * 3
    assert handle.lost == ["", *["old"] * 4]


async def test_where_none_comes_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.serving.pool.client.LOCATE_TIMEOUT", 0.2)
    client = PoolClient(FakeHandle(ENDING), "model")  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="the adapter pool is down"):
        await client.records()


async def test_a_pool_that_died_is_asked_once_more_for_what_may_be_repeated_alone() -> None:
    dead = FakeActor("dead", raising(ActorDiedError()))
    for call, is_answered in (("records", True), ("drain", True), ("pin", False)):
        handle = FakeHandle(dead, FakeActor("new", lambda: ()))
        client = PoolClient(handle, "model")  # type: ignore[arg-type]
        arguments = ("name",) if call == "pin" else ()
        if is_answered:
            await getattr(client, call)(*arguments)
            assert handle.lost == ["", "dead"]
            continue
        with pytest.raises(Unavailable, match="the adapter pool is down"):
            await client.pin("name")


async def test_what_a_pool_says_itself_is_told() -> None:
    client = PoolClient(
        FakeHandle(FakeActor("one", raising(NotFound("there is no such adapter")))),  # type: ignore[arg-type]
        "model",
    )
    with pytest.raises(NotFound, match="no such adapter"):
        await client.records()
