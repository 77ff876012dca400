"""What no name points at goes everywhere."""

import asyncio
from pathlib import Path

import pytest

from cluster.errors import NotFound
from tests.cluster.adapters.service.pools import Make, calm, size, write
from tests.cluster.adapters.service.replicas import Replica


async def test_an_unload_waits_for_running_requests_and_says_what_was_freed(
    make: Make, tmp_path: Path
) -> None:
    replicas = Replica("0"), Replica("1")
    actor = make(*replicas)
    for replica in replicas:
        await actor.attach(replica.address)
    digest = (await actor.load("law", str(write(tmp_path / "law", 1)), False, True)).digest
    assert digest is not None
    replicas[0].lease(digest)
    assert replicas[1].pinned == {digest: (await actor.resolve("law", "")).num_bytes}
    unloading = asyncio.create_task(actor.unload("law", False))
    await calm()
    assert not unloading.done()
    with pytest.raises(NotFound, match="does not exist"):
        await actor.resolve("law", "")
    assert len(await actor.shards(digest)) == 1  # for the one that runs
    replicas[0].release(digest)
    result = await unloading
    assert [replica.unloaded for replica in replicas] == [[digest], [digest]]
    assert (result.versions, result.shared) == ((1,), ())
    (freed,) = result.freed
    assert (freed.digest, freed.forgotten, freed.pages) == (digest, True, 14)
    assert [(slot.replica, slot.slot) for slot in freed.slots] == [("0", 3), ("1", 3)]
    assert 0 < freed.host_bytes <= size()
    with pytest.raises(NotFound, match="unloaded"):
        await actor.shards(digest)
    assert replicas[0].pinned == {}


async def test_force_aborts_running_requests_also_of_an_unload_that_waits(
    make: Make, tmp_path: Path
) -> None:
    replica = Replica()
    actor = make(replica)
    await actor.attach(replica.address)
    path = str(write(tmp_path / "law", 1))
    digest = (await actor.load("law", path, False, False)).digest
    assert digest is not None
    replica.lease(digest)
    assert (await actor.unload("law", True)).freed[0].forgotten
    assert replica.aborted == [digest]
    await actor.load("law", path, False, False)
    replica.lease(digest)
    patient = asyncio.create_task(actor.unload("law", False))
    await calm()
    await actor.unload("law", True)
    assert (await patient).freed[0].forgotten
    with pytest.raises(NotFound):
        await actor.unload("law", True)


async def test_the_same_bytes_loaded_while_they_drain_are_let_in_again_at_once(
    make: Make, tmp_path: Path
) -> None:
    replica = Replica()
    actor = make(replica)
    await actor.attach(replica.address)
    path = str(write(tmp_path / "law", 1))
    digest = (await actor.load("law", path, False, False)).digest
    assert digest is not None
    replica.lease(digest)
    unloading = asyncio.create_task(actor.unload("law", False))
    await calm()
    await actor.load("right", path, False, False)
    result = await unloading
    assert not result.freed[0].forgotten
    replica.lease(digest)  # not fenced
    assert replica.unloaded == []
    assert (await actor.resolve("right", "")).digest == digest


async def test_unloaded_and_loaded_in_one_breath_nothing_is_unloaded(
    make: Make, tmp_path: Path
) -> None:
    replica = Replica()
    actor = make(replica)
    await actor.attach(replica.address)
    path = str(write(tmp_path / "law", 1))
    await actor.load("law", path, False, False)
    loading = asyncio.create_task(actor.load("right", path, False, False))
    while "right" not in actor._catalog:
        if "law" in actor._catalog:
            unloading = asyncio.create_task(actor.unload("law", False))
        await asyncio.sleep(0)
    await asyncio.gather(loading, unloading)
    await calm()
    digest = (await actor.resolve("right", "")).digest
    replica.lease(digest)
    assert len(await actor.shards(digest)) == 1


async def test_content_replaced_often_enough_is_forgotten_everywhere(
    make: Make, tmp_path: Path
) -> None:
    replica = Replica()
    actor = make(replica)
    await actor.attach(replica.address)
    digests = []
    for content in range(6):
        path = str(write(tmp_path / "law", content))
        digests.append((await actor.load("law", path, True, False)).digest)
    await calm()
    assert replica.unloaded == digests[:2]
    with pytest.raises(NotFound):
        await actor.shards(str(digests[0]))


async def test_a_replica_that_is_silent_or_down_is_not_waited_for(
    make: Make, tmp_path: Path
) -> None:
    hung, down, fine = Replica("hung"), Replica("down"), Replica("fine")
    down.is_down = True
    actor = make(hung, down, fine)
    for replica in (hung, down, fine):
        await actor.attach(replica.address)
    await actor.load("law", str(write(tmp_path / "law", 1)), False, False)
    hung.is_hung = True
    (freed,) = (await actor.unload("law", False)).freed
    assert freed.lost_replicas == ("down", "hung")
    assert (freed.forgotten, freed.pages) == (True, 7)
    assert [address.replica for address in (await actor.schedulers()).addresses] == [
        "down",
        "fine",
        "hung",
    ]
