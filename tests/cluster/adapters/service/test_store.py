"""Content that is in memory, or must be read from disk again."""

import asyncio
import gc
import shutil
import weakref
from pathlib import Path

import pytest

from cluster.errors import Conflict, InvalidAdapter, InvalidRequest, NotFound
from tests.cluster.adapters.service.pools import Make, digest_of, write
from tests.patience import PATIENCE
from worker.lora.shard import AdapterShard


async def test_a_rollback_needs_the_old_bytes_and_says_so(make: Make, tmp_path: Path) -> None:
    actor = make(fits=1.2)
    law = tmp_path / "law"
    await actor.load("law", str(write(law, 1)), False, False)
    await actor.load("law", str(write(law, 2)), True, False)
    assert (await actor.record("law")).versions[0].tier == "gone"
    with pytest.raises(Conflict, match=r"version 1 of 'law' cannot be had.*has changed on disk"):
        await actor.rollback("law", None)
    assert (await actor.resolve("law", "")).version == 2
    write(law, 1)
    assert (await actor.rollback("law", None)).version == 1
    assert (await actor.resolve("law", "")).digest == digest_of(tmp_path, 1)
    shutil.rmtree(law)
    with pytest.raises(Conflict, match=r"version 2 of 'law' cannot be had.*no such directory"):
        await actor.rollback("law", 2)
    with pytest.raises(NotFound):
        await actor.rollback("nobody", None)


async def test_a_split_of_a_pinned_name_brings_all_its_versions_to_memory(
    make: Make, tmp_path: Path
) -> None:
    actor = make(fits=2.2)
    for content in (1, 2, 3):
        await actor.load("law", str(write(tmp_path / str(content), content)), True, content == 3)
    record = await actor.split("law", {1: 50, 3: 50})
    assert [version.tier for version in record.versions] == ["host", "disk", "host"]
    with pytest.raises(InvalidRequest, match="cannot be pinned"):
        await actor.split("law", {1: 50, 2: 20, 3: 30})
    actor._catalog.check()


async def test_a_directory_deleted_while_its_request_waits_fails_it_and_no_later_one(
    make: Make, tmp_path: Path
) -> None:
    actor = make(fits=1.2)
    law = write(tmp_path / "law", 1)
    digest = str((await actor.load("law", str(law), False, False)).digest)
    await actor.load("other", str(write(tmp_path / "other", 2)), False, False)
    shutil.rmtree(law)
    with pytest.raises(NotFound, match="no such directory"):
        await actor.shards(digest)
    write(law, 3)
    with pytest.raises(InvalidAdapter, match="has changed on disk"):
        await actor.shards(digest)
    write(law, 1)
    assert len(await actor.shards(digest)) == 1


async def test_another_directory_with_the_same_bytes_will_do(make: Make, tmp_path: Path) -> None:
    actor = make(fits=1.2)
    digest = str((await actor.load("a", str(write(tmp_path / "a", 1)), False, False)).digest)
    await actor.load("b", str(write(tmp_path / "b", 1)), False, False)
    await actor.load("other", str(write(tmp_path / "other", 2)), False, False)
    shutil.rmtree(tmp_path / "b")
    assert len(await actor.shards(digest)) == 1


async def test_shards_stay_in_shared_memory_until_they_must_go(make: Make, tmp_path: Path) -> None:
    live: weakref.WeakSet[AdapterShard] = weakref.WeakSet()

    class Held:
        """A handle; weak references to it tell whether the memory is still held."""

    puts: list[AdapterShard] = []

    def put(shard: AdapterShard) -> Held:
        puts.append(shard)
        handle = Held()
        live.add(handle)  # type: ignore[arg-type]
        return handle

    actor = make(fits=2.2, put=put)
    digests = []
    for content in (1, 2):
        path = str(write(tmp_path / str(content), content))
        digests.append(str((await actor.load(str(content), path, False, False)).digest))
    for _ in range(3):
        for digest in digests:
            await actor.shards(digest)
    assert (len(puts), len(live)) == (2, 2)  # cut once
    await actor.load("3", str(write(tmp_path / "3", 3)), False, False)
    assert len(puts) == 3
    await actor.prefetch(digests[0])
    async with asyncio.timeout(PATIENCE):
        while len(live) > 2:  # a thread may hold what it read last
            await asyncio.sleep(0.001)
    assert (len(puts), len(live)) == (4, 2)
    for name in "123":
        await actor.unload(name, False)
    async with asyncio.timeout(PATIENCE):
        while len(live):
            gc.collect()
            await asyncio.sleep(0.001)
