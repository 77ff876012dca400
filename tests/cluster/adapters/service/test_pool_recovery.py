"""A pool whose process was killed comes back with all that it has answered."""

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from cluster.adapters.records import AdapterRecord
from cluster.adapters.service import pool_state, state_writer
from cluster.adapters.service.pool_state import StateInUse
from cluster.adapters.sharding import RankMemory
from cluster.adapters.state_file import StateFile
from cluster.errors import InvalidAdapter, NotFound, Replaced, Unavailable
from tests.cluster.adapters.service.pools import Make, digest_of, eventually, write
from tests.cluster.adapters.service.replicas import Replica

Restart = Callable[..., Any]


@pytest.fixture
def restart(make: Make, tmp_path: Path) -> Restart:
    """Return a function that kills the last pool and makes another one of the same file."""
    before: list[Any] = []

    async def again(*replicas: Replica, adapters: dict[str, str] | None = None, **more: Any) -> Any:
        for actor in before:
            await actor.close()  # what is not saved by now is lost
        before.clear()
        more = {"poll_interval": 3600, "state": str(tmp_path / "state")} | more
        before.append(make(*replicas, **more))
        await before[0].start(adapters or {})
        for replica in replicas:
            await before[0].attach(replica.address)
        before[0]._catalog.check()
        return before[0]

    return again


def told(record: AdapterRecord) -> AdapterRecord:
    """Return a record without where its content is: memory was lost with the process."""
    versions = tuple(structs.replace(version, tier="disk") for version in record.versions)
    return structs.replace(record, tier="disk", versions=versions)


async def all_told(actor: Any) -> list[AdapterRecord]:
    return [told(record) for record in await actor.records()]


async def test_names_versions_splits_and_pins_are_there_again(
    restart: Restart, tmp_path: Path
) -> None:
    replica = Replica()
    actor = await restart(replica)
    paths = [str(write(tmp_path / f"a{content}", content)) for content in range(4)]
    for path in paths[:3]:
        await actor.load("law", path, True, False)
    await actor.split("law", {1: 30, 3: 70})
    for path in paths[:2]:
        await actor.load("art", path, True, True)
    await actor.rollback("art", 1)
    await actor.load("gone", paths[3], False, False)
    await actor.unload("gone", False)
    records = await all_told(actor)
    resolved = [await actor.resolve("law", str(number)) for number in range(20)]
    pinned = replica.pinned
    replica.pinned = {"of another life": 7}
    actor = await restart(replica)
    assert await all_told(actor) == records
    assert [await actor.resolve("law", str(number)) for number in range(20)] == resolved
    assert replica.pinned == pinned
    assert len(pinned) == 1
    for one in resolved:
        (shards,) = await actor.shards(one.digest)
        assert shards[0].digest == one.digest
    with pytest.raises(NotFound):
        await actor.resolve("gone", "")
    assert (await actor.load("gone", paths[3], False, False)).version == 2


async def test_nothing_is_read_before_it_is_asked_for_and_then_it_is_verified(
    restart: Restart, tmp_path: Path
) -> None:
    actor = await restart()
    for name, content in (("law", 1), ("art", 2)):
        await actor.load(name, str(write(tmp_path / name, content)), False, False)
    actor = await restart()
    law, art = [await actor.resolve(name, "") for name in ("law", "art")]
    assert actor._threads.results == {"ok": 0, "failed": 0}
    write(tmp_path / "law", 3)
    with pytest.raises(InvalidAdapter, match="law has changed on disk since it was loaded"):
        await actor.shards(law.digest)
    (shards,) = await actor.shards(art.digest)
    assert shards[0].digest == digest_of(tmp_path, 2)
    assert actor._threads.results == {"ok": 2, "failed": 0}
    assert (await actor.load("law", str(tmp_path / "law"), True, False)).version == 2


async def test_a_directory_that_is_not_there_yet_is_waited_for_and_nothing_is_404(
    restart: Restart, tmp_path: Path
) -> None:
    configured = {"lazy": str(write(tmp_path / "volume" / "lazy", 1))}
    actor = await restart(adapters=configured)
    await actor.load("law", str(write(tmp_path / "volume" / "law", 2)), False, False)
    (tmp_path / "volume").rename(tmp_path / "elsewhere")
    actor = await restart(adapters=configured)
    assert [record.name for record in await actor.records()] == ["law", "lazy"]
    with pytest.raises(Unavailable, match="lazy.*no such directory.*before the adapter pool") as e:
        await actor.resolve("lazy", "")
    assert e.value.retry_after is not None
    law = await actor.resolve("law", "")
    with pytest.raises(Unavailable, match="law.*no such directory.*Bring the directory back"):
        await actor.shards(law.digest)
    (tmp_path / "elsewhere").rename(tmp_path / "volume")
    assert (await actor.resolve("lazy", "")).digest == digest_of(tmp_path, 1)
    await actor.shards(law.digest)
    shutil.rmtree(tmp_path / "volume")
    actor._catalog._contents._host.discard(law.digest)
    with pytest.raises(NotFound, match="no such directory"):  # it was there in this life
        await actor.shards(law.digest)


def calls_of(actor: Any, folder: Path) -> tuple[Any, ...]:
    return (
        actor.resolve("law", ""),
        actor.record("law"),
        actor.records(),
        actor.load("law", str(write(folder / "law", 1)), False, False),
        actor.unload("law", False),
        actor.rollback("law", None),
        actor.split("law", {1: 100}),
        actor.pin("law"),
        actor.unpin("law"),
        actor.shards("0" * 64),
        actor.attach(Replica().address),
        actor.schedulers(),
        actor.drain(),
        actor.undrain(),
        actor.is_drained(),
    )


async def test_once_it_has_begun_to_end_every_call_is_for_the_pool_after_it(
    make: Make, tmp_path: Path
) -> None:
    actor: Any = make(state=str(tmp_path / "state"))
    await actor.start({})
    ending = asyncio.create_task(actor.close())
    await asyncio.sleep(0)
    assert not ending.done()
    with pytest.raises(Replaced):
        await actor.records()
    await ending
    for call in calls_of(actor, tmp_path):
        with pytest.raises(Replaced):
            await call


async def test_until_the_state_is_read_every_call_is_to_come_back(
    make: Make, tmp_path: Path
) -> None:
    actor: Any = make(state=str(tmp_path / "state"))
    for call in calls_of(actor, tmp_path):
        with pytest.raises(Unavailable, match="reading its state") as caught:
            await call
        assert caught.value.retry_after is not None
    await actor.start({})
    assert await actor.records() == ()


async def test_a_drain_outlives_the_pool_and_not_the_server_and_can_be_taken_back(
    restart: Restart,
) -> None:
    actor = await restart(server="one")
    assert not await actor.is_drained()
    await actor.drain()
    actor = await restart(server="one")
    assert await actor.is_drained()
    await actor.undrain()
    actor = await restart(server="one")
    assert not await actor.is_drained()
    await actor.drain()
    actor = await restart(server="two")
    assert not await actor.is_drained()


async def test_what_only_running_requests_use_can_be_had_until_they_end(
    restart: Restart, tmp_path: Path
) -> None:
    replica = Replica()
    actor = await restart(replica, silence=0.05)
    for content in range(6):  # the first two are not kept
        path = str(write(tmp_path / f"a{content}", content))
        digest = (await actor.load("law", path, True, False)).digest
        if content < 2:
            replica.lease(digest)
    first, second = digest_of(tmp_path, 0), digest_of(tmp_path, 1)
    replica._fenced.clear()  # it forgets the old pool's orders with its connection
    actor = await restart(replica, silence=0.05)
    assert set(actor._catalog.retired()) == {first, second}
    for digest in (first, second):
        (shards,) = await actor.shards(digest)
        assert shards[0].digest == digest
    replica.release(first)
    await eventually(lambda: set(actor._catalog.retired()) == {second})
    assert replica.unloaded == [first]
    await actor.shards(second)
    replica.release(second)
    await eventually(lambda: not actor._catalog.retired())
    actor = await restart(replica, silence=0.05)
    # It may have ended before it wrote that the last one is not needed: then it finds that again.
    await eventually(lambda: not actor._catalog.retired())
    with pytest.raises(NotFound):
        await actor.shards(second)


async def test_what_was_being_unloaded_and_is_loaded_again_is_let_in_everywhere(
    restart: Restart, tmp_path: Path
) -> None:
    early, late = Replica("early"), Replica("late")
    actor = await restart(early, late)
    digest = (await actor.load("law", str(write(tmp_path / "law", 1)), False, False)).digest
    for replica in (early, late):
        replica.lease(digest)
        replica.fence(digest, force=False)  # what the old pool orders
    actor._catalog.unload("law")
    await actor._state.saved()
    actor = await restart(early, late)
    await actor.detach("late")
    assert (await actor.load("law", str(tmp_path / "law"), False, False)).version == 1 + 1
    early.lease(digest)  # raises if it is fenced
    with pytest.raises(NotFound):
        late.lease(digest)
    await actor.attach(late.address)
    late.lease(digest)


async def test_a_damaged_state_is_told_and_one_that_another_pool_has_until_that_ends(
    restart: Restart, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_state, "LOCK_TIMEOUT", 0.1)
    actor = await restart()
    for name in "abc":
        await actor.load(name, str(write(tmp_path / name, 1)), False, False)
    other = make(state=str(tmp_path / "state"))
    with pytest.raises(StateInUse, match="in use by another adapter pool"):
        await other.start({})
    await actor.close()
    await other.start({})
    assert [record.name for record in await other.records()] == ["a", "b", "c"]
    await other.close()
    lines = (tmp_path / "state").read_bytes().splitlines(keepends=True)
    (tmp_path / "state").write_bytes(b"".join([*lines[:1], b"0" + lines[1][1:], *lines[2:]]))
    with pytest.raises(Unavailable, match=r"state, line 2 at byte 24: it is damaged.*move it away"):
        await restart()


async def test_entries_of_another_version_are_told(restart: Restart, tmp_path: Path) -> None:
    for entry, value in (("mood/law", 1), ("name/law", {}), ("name/law", {"last_number": "x"})):
        (tmp_path / "state").unlink(missing_ok=True)
        file = StateFile(tmp_path / "state")
        file.write({entry: value})
        file.close()
        with pytest.raises(Unavailable, match=f"entry '{entry}'.*name another file"):
            await restart()


async def test_the_configuration_goes_on_from_what_it_said_before(
    restart: Restart, tmp_path: Path
) -> None:
    adapters = {name: str(write(tmp_path / name, ord(name))) for name in "abcd"}
    other = str(write(tmp_path / "other", 1))
    actor = await restart(adapters=adapters)
    await actor.unload("a", False)
    await actor.load("b", other, True, False)
    first = (await actor.resolve("c", "")).digest
    write(tmp_path / "c", 2)
    actor = await restart(adapters={name: adapters[name] for name in "abc"})
    assert [record.name for record in await actor.records()] == ["b", "c"]
    assert (await actor.record("b")).path == other
    changed = await actor.resolve("c", "")
    assert (changed.version, changed.digest != first) == (2, True)
    spoilt = adapters | {"c": str(tmp_path / "nowhere")}
    for _ in range(2):
        with pytest.raises(NotFound, match="'c'.*no such directory"):
            await restart(adapters=spoilt, server="that is started with this")
    actor = await restart(adapters=adapters, server="that gets this later")
    assert list(await actor.follow(spoilt, ())) == ["c"]
    actor = await restart(adapters=spoilt, server="that gets this later")
    assert list(actor._configured.refused) == ["c"]  # it serves already
    shutil.rmtree(tmp_path / "c")  # that was served before: the rest goes on
    actor = await restart(adapters=adapters)
    assert [record.name for record in await actor.records()] == ["b", "c", "d"]
    actor = await restart(adapters={"a": other})  # it says something new of this one
    assert [record.name for record in await actor.records()] == ["a", "b"]


async def test_watched_directories_go_on_from_what_was_seen_before(
    restart: Restart, tmp_path: Path
) -> None:
    adapters = tmp_path / "adapters"
    for name in "abcd":
        write(adapters / name, ord(name))
    actor = await restart(adapter_dirs=(str(adapters),))
    for name in "abc":
        await actor.resolve(name, "")
    await actor.unload("a", False)
    write(adapters / "b", 1)
    await actor._watcher.poll()
    await actor.rollback("b", 1)
    write(adapters / "c", 2)
    shutil.rmtree(adapters / "d")
    actor = await restart(adapter_dirs=(str(adapters),))
    assert [record.name for record in await actor.records()] == ["b", "c", "d"]
    await eventually(lambda: "d" not in actor._catalog)  # it looks in the background
    await actor._watcher.poll()
    records = {record.name: (record.version, record.watched) for record in await actor.records()}
    assert records == {"b": (1, True), "c": (2, True)}
    with pytest.raises(NotFound):
        await actor.resolve("a", "")


async def test_adapters_that_are_cut_otherwise_now_are_read_before_they_are_resolved(
    restart: Restart, tmp_path: Path
) -> None:
    replica = Replica()
    actor = await restart(replica)
    for name, content, pinned in (("law", 1, False), ("art", 2, True)):
        await actor.load(name, str(write(tmp_path / name, content)), False, pinned)
    before = await actor.resolve("law", "")
    pins = replica.pinned
    wider = RankMemory(tp=1, adapter_item_bytes=8, model_item_bytes=4)
    for _ in range(2):  # what was not read is outdated still
        actor = await restart(replica, memory=wider)
        assert replica.pinned.keys() == pins.keys()
        assert all(replica.pinned[digest] > pins[digest] for digest in pins)
    after = await actor.resolve("law", "")
    assert (after.digest, after.version) == (before.digest, before.version)
    assert after.num_bytes > before.num_bytes
    actor = await restart(replica, memory=wider)
    assert await actor.resolve("law", "") == after
    assert (await actor.record("law")).tier == "disk"  # it was not read again


async def test_pins_that_do_not_fit_any_more_are_told_and_the_names_stay(
    restart: Restart, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    actor = await restart()
    for content in range(3):
        path = str(write(tmp_path / str(content), content))
        await actor.load(f"a{content}", path, False, True)
    with caplog.at_level(logging.WARNING, "topwork.pool"):
        actor = await restart(fits=2.2)
    assert [record.pinned for record in await actor.records()] == [True, True, False]
    assert "a2 was pinned and is not any more: 'a2' takes" in caplog.text


async def test_what_confines_reading_is_what_the_configuration_says_now(
    restart: Restart, tmp_path: Path
) -> None:
    inside, outside = write(tmp_path / "in" / "a", 1), write(tmp_path / "out" / "b", 2)
    own = {"own": str(write(tmp_path / "out" / "own", 3))}
    actor = await restart(adapters=own)
    for name, path in (("a", inside), ("b", outside)):
        await actor.load(name, str(path), False, False)
    await actor.resolve("own", "")
    actor = await restart(adapters=own, adapter_roots=(str(tmp_path / "in"),))
    for name in ("a", "own"):
        await actor.shards((await actor.resolve(name, "")).digest)
    digest = (await actor.resolve("b", "")).digest
    with pytest.raises(InvalidAdapter, match="outside of the directories"):
        await actor.shards(digest)


async def test_a_name_that_is_the_base_models_by_now_waits_for_another_one(
    restart: Restart, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    actor = await restart()
    await actor.load("law", str(write(tmp_path / "law", 1)), False, False)
    await actor.close()
    file = StateFile(tmp_path / "state")
    file.write({"name/tiny": file.entries["name/law"]})
    file.close()
    actor = await restart()
    assert [record.name for record in await actor.records()] == ["law"]
    assert "tiny was loaded and is not served any more" in caplog.text


async def test_a_disk_that_refuses_is_told_and_what_is_in_force_is_saved_later(
    restart: Restart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_writer, "RETRY_SECONDS", 0.01)
    actor = await restart()
    path = str(write(tmp_path / "law", 1))
    with monkeypatch.context() as patch:
        patch.setattr(StateFile, "write", refuse)
        with pytest.raises(Unavailable, match="in force, but it is not saved.*No space left"):
            await actor.load("law", path, False, False)
        assert (await actor.resolve("law", "")).version == 1
        with pytest.raises(Unavailable, match="not saved"):
            await actor.drain()
        with pytest.raises(Unavailable, match="not saved"):
            await actor.unload("law", True)
    await actor.load("art", path, False, False)
    actor = await restart()
    assert [record.name for record in await actor.records()] == ["art"]
    assert await actor.is_drained()
