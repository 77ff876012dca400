"""Background work of the pool that fails: logged, counted, begun again."""

from pathlib import Path
from typing import Any

import pytest

from cluster.adapters.state_file import StateFile
from cluster.metrics_hub import RouterCounts
from tests.cluster.adapters.service.pools import Make, eventually, write
from tests.cluster.adapters.service.replicas import Replica


async def fail(*_: object, **__: object) -> None:
    raise ZeroDivisionError("a bug")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.supervision.RESTART_DELAY", 0.01)
    monkeypatch.setattr("cluster.adapters.service.garbage_collector.RETRY_SECONDS", 0.01)


async def failures(actor: Any) -> dict[str, int]:
    """Return what routers show."""
    counts = (await actor.report(RouterCounts("r", 1, {}, {}, {}, 0), True)).pool
    found: dict[str, int] = counts.task_failures
    return found


async def test_directories_are_looked_at_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    actor: Any = make(adapter_dirs=(str(adapters),), poll_interval=0.01)
    await actor.start({})
    assert set((await failures(actor)).values()) == {0}
    with monkeypatch.context() as patch:
        patch.setattr(actor._watcher, "poll", fail)
        await eventually(lambda: actor._failures["adapter_directories"] > 1)
    assert "ZeroDivisionError: a bug" in caplog.text
    write(adapters / "new", 1)
    await eventually(lambda: "new" in actor._catalog)
    assert (await failures(actor))["adapter_directories"] > 1


async def test_a_directory_that_meets_a_bug_does_not_keep_out_those_behind_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        write(tmp_path / "adapters" / name, ord(name))
    actor: Any = make(adapter_dirs=(str(tmp_path / "adapters"),), poll_interval=3600)
    outline = actor._threads._reader.outline

    def outline_of_some(source: Any) -> Any:
        return outline(source) if not source.path.endswith("b") else 1 // 0

    monkeypatch.setattr(actor._threads._reader, "outline", outline_of_some)
    refused = await actor.start({})
    assert list(refused) == ["b"]
    assert "ZeroDivisionError" in refused["b"]
    assert [record.name for record in await actor.records()] == ["a", "c"]


async def test_unloads_are_tried_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replica = Replica()
    actor: Any = make(replica)
    await actor.attach(replica.address)
    digest = (await actor.load("law", str(write(tmp_path / "law", 1)), False, False)).digest
    with monkeypatch.context() as patch:
        patch.setattr(actor._registry, "unload", fail)
        with pytest.raises(ZeroDivisionError):
            await actor.unload("law", True)
    assert "ZeroDivisionError: a bug" in caplog.text
    await eventually(lambda: not actor._catalog.retired())
    assert replica.unloaded == [digest]
    assert (await failures(actor))["adapter_unloads"] > 0


async def test_the_state_is_written_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    actor: Any = make(state=str(tmp_path / "state"))
    await actor.start({})
    with monkeypatch.context() as patch:
        patch.setattr(StateFile, "write", lambda *_: 1 // 0)
        await eventually_fails(actor.drain())
    assert "ZeroDivisionError" in caplog.text
    await actor.load("law", str(write(tmp_path / "law", 1)), False, False)
    assert (await failures(actor))["adapter_state"] > 0
    await actor.close()
    actor = make(state=str(tmp_path / "state"))
    await actor.start({})
    assert [record.name for record in await actor.records()] == ["law"]
    assert await actor.is_drained()


async def eventually_fails(call: Any) -> None:
    with pytest.raises(Exception, match="not saved"):
        await call
