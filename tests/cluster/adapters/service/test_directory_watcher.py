"""Directories of adapters that appear, change and go while they are served."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from cluster.errors import InvalidAdapter, NotFound
from tests.cluster.adapters.service.pools import Make, calm, digest_of, spoil, write
from tests.cluster.adapters.service.replicas import Replica
from tests.patience import PATIENCE


async def test_new_touched_and_removed_directories_are_followed(make: Make, tmp_path: Path) -> None:
    replica = Replica()
    adapters = tmp_path / "adapters"
    write(adapters / "a", 1)
    write(adapters / "b", 2)
    (adapters / "no adapter").mkdir()
    (adapters / "notes.txt").write_text("hello")
    actor = make(replica, adapter_dirs=(str(adapters),), poll_interval=3600)
    await actor.attach(replica.address)
    assert await actor.start({}) == {}
    assert [(r.name, r.watched) for r in await actor.records()] == [("a", True), ("b", True)]
    first = (await actor.resolve("a", "")).digest
    write(adapters / "a", 3)
    shutil.rmtree(adapters / "b")
    write(adapters / "c", 4)
    await actor._watcher.poll()
    assert [record.name for record in await actor.records()] == ["a", "c"]
    assert (await actor.resolve("a", "")).version == 2
    assert (await actor.rollback("a", None)).digest == first
    await actor._watcher.poll()
    assert (await actor.resolve("a", "")).digest == first
    shutil.rmtree(adapters / "a")
    await actor._watcher.poll()
    await calm()
    with pytest.raises(NotFound):
        await actor.resolve("a", "")
    assert len(replica.unloaded) == 2
    actor._catalog.check()


async def test_a_miss_looks_for_a_directory_of_that_name(make: Make, tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    actor = make(adapter_dirs=(str(adapters),), poll_interval=3600)
    await actor.start({})
    for name in ("new", "../outside", "..", "tiny"):
        with pytest.raises(NotFound):
            await actor.resolve(name, "")
    write(adapters / "new", 1)
    write(tmp_path / "outside", 2)
    assert (await actor.resolve("new", "")).version == 1
    with pytest.raises(NotFound):
        await actor.resolve("../outside", "")
    spoil(adapters / "nan")
    with pytest.raises(InvalidAdapter, match="NaN"):
        await actor.resolve("nan", "")
    (adapters / "torn").mkdir()
    shutil.copy(adapters / "new" / "adapter_config.json", adapters / "torn")
    (adapters / "torn" / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(InvalidAdapter, match="truncated"):
        await actor.resolve("torn", "")


async def test_a_directory_that_is_half_written_leaves_the_old_version_in_place(
    make: Make, tmp_path: Path
) -> None:
    law = write(tmp_path / "law", 1)
    actor = make(adapter_dirs=(str(tmp_path),), poll_interval=3600)
    await actor.start({})
    digest = (await actor.resolve("law", "")).digest
    weights = law / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    await actor._watcher.poll()
    assert (await actor.resolve("law", "")).digest == digest
    assert "truncated" in actor._watcher.refused["law"]
    write(law, 2)
    await actor._watcher.poll()
    assert actor._watcher.refused == {}
    assert (await actor.resolve("law", "")).version == 2


async def test_touching_a_directory_without_changing_it_is_no_new_version(
    make: Make, tmp_path: Path
) -> None:
    law = write(tmp_path / "law", 1)
    actor = make(adapter_dirs=(str(tmp_path),), poll_interval=3600)
    await actor.start({})
    await actor.resolve("law", "")
    os.utime(law / "adapter_model.safetensors", ns=(1, 1))
    await actor._watcher.poll()
    assert (await actor.record("law")).version == 1


async def test_calls_go_before_directories(make: Make, tmp_path: Path) -> None:
    adapters, other = tmp_path / "adapters", write(tmp_path / "other", 9)
    write(adapters / "law", 1)
    actor = make(adapter_dirs=(str(adapters),), poll_interval=3600)
    await actor.start({})
    record = await actor.load("law", str(other), True, False)
    assert (record.watched, record.path) == (False, str(other))
    write(adapters / "law", 2)
    await actor._watcher.poll()
    assert (await actor.record("law")).path == str(other)
    await actor.unload("law", False)
    await actor._watcher.poll()
    with pytest.raises(NotFound):
        await actor.resolve("law", "")
    write(adapters / "law", 3)
    assert (await actor.resolve("law", "")).digest == digest_of(tmp_path, 3)


async def test_an_unloaded_directory_stays_out_until_it_is_touched(
    make: Make, tmp_path: Path
) -> None:
    law = write(tmp_path / "law", 1)
    actor = make(adapter_dirs=(str(tmp_path),), poll_interval=3600)
    await actor.start({})
    await actor.unload("law", False)
    await actor._watcher.poll()
    with pytest.raises(NotFound):
        await actor.resolve("law", "")
    os.utime(law / "adapter_config.json", ns=(1, 1))
    await actor._watcher.poll()
    assert (await actor.resolve("law", "")).version == 2


async def test_a_directory_of_adapters_that_cannot_be_listed_takes_nothing_away(
    make: Make, tmp_path: Path
) -> None:
    adapters = tmp_path / "adapters"
    write(adapters / "law", 1)
    actor = make(adapter_dirs=(str(adapters),), poll_interval=3600)
    await actor.start({})
    adapters.rename(tmp_path / "away")
    await actor._watcher.poll()
    assert [record.name for record in await actor.records()] == ["law"]
    (tmp_path / "away").rename(adapters)
    await actor._watcher.poll()
    assert (await actor.resolve("law", "")).version == 1


async def test_the_loop_finds_a_new_directory_by_itself(make: Make, tmp_path: Path) -> None:
    actor = make(adapter_dirs=(str(tmp_path),), poll_interval=0.01)
    await actor.start({})
    write(tmp_path / "law", 1)
    async with asyncio.timeout(PATIENCE):
        while not await actor.records():
            await asyncio.sleep(0.01)


async def test_a_directory_of_adapters_confines_what_is_found_in_it(
    make: Make, tmp_path: Path
) -> None:
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "law").symlink_to(write(tmp_path / "outside", 1))
    actor = make(adapter_dirs=(str(adapters),), poll_interval=3600)
    refused = await actor.start({})
    assert "outside of the directories" in refused["law"]
    assert await actor.records() == ()
    with pytest.raises(InvalidAdapter, match="outside of the directories"):
        await actor.resolve("law", "")
    await actor.load("law", str(tmp_path / "outside"), False, False)  # without roots: anywhere
