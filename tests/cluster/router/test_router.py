"""What a router does beside its calls."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import supervision
from cluster.adapters.records import LoadOptions
from cluster.errors import InvalidAdapter, Unavailable
from cluster.router.router import LOADS_AT_ONCE, Router
from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.patience import PATIENCE


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("task", "method"),
    [("replicas", "refresh"), ("drain", "is_drained"), ("metrics", "report"), ("keys", "look")],
)
def test_a_background_task_that_fails_is_counted_and_begun_again(
    serve: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    task: str,
    method: str,
) -> None:
    monkeypatch.setattr(supervision, "RESTART_DELAY", 0.01)
    monkeypatch.setattr("cluster.router.tenancy.followed_file.INTERVAL", 0.01)
    monkeypatch.setattr("cluster.router.metrics.aggregation.INTERVAL", 0.01)
    (tmp_path / "keys.yaml").write_text("[]")
    serving = serve(FakeScheduler(), api_key_file=str(tmp_path / "keys.yaml"))
    router: Router = serving.router
    owners: dict[str, Any] = {"replicas": router.replicas, "keys": vars(router.keys)["_file"]}
    owner: Any = owners.get(task, serving.backend)
    works, calls = getattr(owner, method), []

    async def fails_twice(*args: Any) -> Any:
        calls.append(args)
        if len(calls) <= 2:
            raise ValueError("a bug")
        return await works(*args)

    setattr(owner, method, fails_twice)
    serving.run(until(lambda: len(calls) > 3))
    failures = dict(router.metrics.counts("r").counters["background_task_failures"])
    assert {labels: count for labels, count in failures.items() if count} == {(task,): 2}


def test_a_drain_and_its_end_are_followed(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    serving.run(serving.backend.drain())
    serving.run(until(lambda: serving.router.is_draining))
    serving.run(serving.backend.undrain())
    serving.run(until(lambda: not serving.router.is_draining))


def test_a_drain_that_the_pool_could_not_hear_of_is_told_again(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    works = serving.backend.drain

    async def away() -> None:
        raise Unavailable("the adapter pool is down")

    serving.backend.drain = away
    with pytest.raises(Unavailable):
        serving.run(serving.router.drain())
    assert serving.router.is_draining and not serving.run(serving.backend.is_drained())
    told = asyncio.Event()

    async def back() -> None:
        await works()
        told.set()

    serving.backend.drain = back
    serving.run(told.wait())
    assert serving.router.is_draining and serving.run(serving.backend.is_drained())


def test_few_loads_of_what_lies_at_the_pool_are_with_it_at_once_and_fetches_wait_for_none(
    serve: Callable[..., Any],
) -> None:
    serving = serve(FakeScheduler())
    router: Router = serving.router
    works, may_end = serving.backend.load, asyncio.Event()
    running: list[str] = []
    most: list[int] = []

    async def held(name: str, path: str, *args: Any) -> Any:
        running.append(path)
        most.append(sum(one.startswith("/") for one in running))
        await may_end.wait()
        running.remove(path)
        return await works(name, path, *args)

    serving.backend.load = held
    at_pool = [f"/adapters/{number}" for number in range(3 * LOADS_AT_ONCE)]
    broken = [f"/broken/{number}" for number in range(LOADS_AT_ONCE)]
    elsewhere = [f"hf://someone/{number}" for number in range(3)]

    async def load_all() -> list[Any]:
        loads = [
            asyncio.create_task(router.load(f"n{number}", path, LoadOptions()))
            for number, path in enumerate([*broken, *at_pool, *elsewhere])
        ]
        await until(lambda: len(running) == LOADS_AT_ONCE + len(elsewhere))
        loads[-len(elsewhere) - 1].cancel()  # one that waits goes away
        may_end.set()
        return await asyncio.gather(*loads, return_exceptions=True)

    results = serving.run(load_all())
    assert max(most) == LOADS_AT_ONCE
    refused, done = results[: len(broken)], results[len(broken) :]
    assert all(isinstance(one, InvalidAdapter) for one in refused)
    assert [isinstance(one, BaseException) for one in done].count(True) == 1
