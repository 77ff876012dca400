"""A pool that ends while it is called: what has begun is done, or its caller is told."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster.adapters.records import LoadOptions
from cluster.adapters.service.calls import in_flight
from cluster.errors import Replaced, Unavailable
from tests.cluster.adapters.service.pools import Make, write
from tests.cluster.adapters.service.replicas import Replica
from tests.patience import PATIENCE


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "END_TIMEOUT", 0.05)


async def begun(call: Any) -> "asyncio.Task[Any]":
    """Start a call; return when it waits for something."""
    task = asyncio.create_task(call)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def never(*_: object) -> None:
    await asyncio.Event().wait()


async def test_a_load_that_has_begun_is_done_and_saved(make: Make, tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    actor = make(state=state)
    await actor.start({})
    loads = [
        await begun(actor.load(name, str(write(tmp_path / name, number)), False, False))
        for number, name in enumerate("abc")
    ]
    await actor.close()
    assert [(await load).name for load in loads] == ["a", "b", "c"]
    with pytest.raises(Replaced):
        await actor.load("d", str(tmp_path / "a"), False, False)
    after = make(state=state)
    await after.start({})
    assert [record.name for record in await after.records()] == ["a", "b", "c"]


@pytest.mark.usefixtures("quick")
async def test_a_change_that_takes_too_long_is_told_of_and_a_question_is_sent_on(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica("one")
    actor = make(replica)
    await actor.start({})
    await actor.attach(replica.address)
    for name in "ab":
        await actor.load(name, str(write(tmp_path / name, ord(name))), False, False)
    replica.lease((await actor.resolve("a", "")).digest)  # for longer than anyone waits
    change = await begun(actor.unload("a", False))
    monkeypatch.setattr(actor._state, "settled", never)
    question = await begun(actor.resolve("b", ""))
    await actor.close()
    with pytest.raises(Unavailable, match="replaced before this call was done") as told:
        await asyncio.wait_for(change, PATIENCE)
    assert not isinstance(told.value, Replaced)
    with pytest.raises(Replaced):
        await asyncio.wait_for(question, PATIENCE)


@pytest.mark.usefixtures("quick")
async def test_a_load_of_tensors_is_one_call_with_its_parts(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = make(staging=str(tmp_path / "staging"), adapter_roots=(str(tmp_path),))
    await actor.start({})
    monkeypatch.setattr(actor._uploads, "fill", never)
    call = await begun(
        actor.load_tensors("a", str(tmp_path / "a.safetensors"), b"{}", LoadOptions(False, False))
    )
    await actor.close()
    with pytest.raises(Unavailable, match="replaced before this call was done"):
        await asyncio.wait_for(call, PATIENCE)


async def test_a_caller_that_goes_away_is_not_told_that_the_pool_was_replaced(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = make()
    await actor.start({})
    monkeypatch.setattr(actor._state, "settled", never)
    call = await begun(actor.records())
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call, PATIENCE)
    await actor.close()
