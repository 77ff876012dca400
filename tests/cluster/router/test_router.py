"""What a router does beside its calls."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import supervision
from cluster.errors import Unavailable
from cluster.router.router import Router
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
