"""The pool actor over real directories, with replicas that hold leases."""

import asyncio
import gc
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ObjectStoreFullError

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.pins import Limits
from cluster.adapters.service.actor import AdapterPoolActor, AdapterPoolConfig
from cluster.adapters.service.scheduler_links import Gone, SchedulerLinks
from cluster.adapters.shards import RankMemory, cut_all
from cluster.errors import Conflict, InvalidAdapter, InvalidRequest, NotFound, Unavailable
from cluster.metrics_hub import Page, RouterCounts
from cluster.weighted_adapters import compose
from tests.cluster.adapters.service.replicas import Replica, connector
from tests.cluster.adapters.tiny import LIMITS, MEMORY, MODEL, tiny_adapter
from tests.patience import PATIENCE
from worker.lora.shard import AdapterShard

Make = Callable[..., AdapterPoolActor]


def write(folder: Path, content: int) -> Path:
    """Write one of many adapters of equal size; equal contents have equal bytes."""
    return tiny_adapter("q_proj", "v_proj", seed=content).write(folder)


def spoil(folder: Path) -> None:
    """Put a NaN into the tensors of a directory."""
    adapter = tiny_adapter("q_proj", "v_proj")
    next(iter(adapter.tensors.values()))[0, 0] = np.nan
    adapter.write(folder)


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Return a function that makes a pool actor with these replicas attached."""
    made: list[AdapterPoolActor] = []

    def start(*replicas: Replica, fits: float = 100, put: Any = lambda x: x, **more: Any) -> Any:
        limits = Limits(host_bytes=int(fits * size()), num_slots=4)
        more = {"memory": MEMORY, "silence": 0.05} | more
        config = AdapterPoolConfig(model=MODEL, limits=LIMITS, **more)
        made.append(
            AdapterPoolActor(config, AdapterCatalog("tiny", limits), connector(*replicas), put)
        )
        return made[-1]

    yield start
    for actor in made:
        await actor.close()


def size() -> int:
    """Return what the only shard of an adapter of `write` holds in memory."""
    adapter = tiny_adapter("q_proj", "v_proj")
    with tempfile.TemporaryDirectory() as folder:
        (shard,) = cut_all(adapter.read(Path(folder)), 1)
    return shard.data.nbytes


def digest_of(folder: Path, content: int) -> str:
    """Return the digest of a content."""
    shutil.rmtree(folder / "scratch", ignore_errors=True)
    return tiny_adapter("q_proj", "v_proj", seed=content).read(folder / "scratch").digest


async def calm() -> None:
    """Let everything happen that can without a thread."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_loaded_adapter_resolves_and_its_shards_are_cut(make: Make, tmp_path: Path) -> None:
    actor = make(memory=RankMemory(tp=3, adapter_item_bytes=4, model_item_bytes=2))
    record = await actor.load("law", str(write(tmp_path / "law", 1)), False, False)
    resolved = await actor.resolve("law", "any")
    assert (resolved.version, resolved.digest) == (1, record.digest)
    (shards,) = await actor.shards(resolved.digest)
    assert [(shard.rank, shard.tp, shard.digest) for shard in shards] == [
        (rank, 3, record.digest) for rank in range(3)
    ]


async def test_start_registers_without_reading_a_tensor(make: Make, tmp_path: Path) -> None:
    write(tmp_path / "good", 1)
    spoil(tmp_path / "spoilt")
    actor = make()
    await actor.start({name: str(tmp_path / name) for name in ("good", "spoilt")})
    assert [record.digest for record in await actor.records()] == [None, None]
    assert (await actor.resolve("good", "")).digest == digest_of(tmp_path, 1)
    with pytest.raises(InvalidAdapter, match=r"spoilt.*NaN"):
        await actor.resolve("spoilt", "")
    write(tmp_path / "spoilt", 2)
    assert (await actor.resolve("spoilt", "")).digest == digest_of(tmp_path, 2)


async def test_start_names_the_adapter_that_cannot_be_served(make: Make, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidAdapter, match=r"'law'.*adapter_config.json is missing"):
        await make().start({"law": str(tmp_path / "empty")})
    with pytest.raises(NotFound, match="'law'.*no such directory"):
        await make().start({"law": str(tmp_path / "none")})


async def test_concurrent_first_requests_share_one_read_and_its_failure(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = make()
    await actor.start({"law": str(write(tmp_path / "law", 1))})
    reads: list[Any] = []
    whole = actor._reads._reader.whole
    monkeypatch.setattr(actor._reads._reader, "whole", lambda s: (reads.append(s), whole(s))[1])
    spoil(tmp_path / "law")
    failed = await asyncio.gather(
        *(actor.resolve("law", str(n)) for n in range(9)), return_exceptions=True
    )
    assert [type(one) for one in failed] == [InvalidAdapter] * 9
    write(tmp_path / "law", 1)
    resolved = await asyncio.gather(*(actor.resolve("law", str(n)) for n in range(9)))
    assert {one.digest for one in resolved} == {digest_of(tmp_path, 1)}
    assert len(reads) == 2


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
    while "right" not in actor._pool:
        if "law" in actor._pool:
            unloading = asyncio.create_task(actor.unload("law", False))
        await asyncio.sleep(0)
    await asyncio.gather(loading, unloading)
    await calm()
    digest = (await actor.resolve("right", "")).digest
    replica.lease(digest)
    assert len(await actor.shards(digest)) == 1


async def test_an_unload_that_is_not_wanted_any_more_is_not_ordered(tmp_path: Path) -> None:
    replica = Replica()
    links = SchedulerLinks(connector(replica), silence=5)
    await links.attach(replica.address)
    assert await links.unload("digest", lambda: False, force=True) == Gone()
    assert replica.unloaded == []
    await links.unload("digest", lambda: True, force=False)
    assert replica.unloaded == ["digest"]
    links.close()


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
    actor._pool.check()


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


async def test_no_room_for_shards_is_told_and_passes(make: Make, tmp_path: Path) -> None:
    is_full = True

    def put(shard: AdapterShard) -> AdapterShard:
        if is_full:
            raise ObjectStoreFullError("full")
        return shard

    actor, path = make(put=put), str(write(tmp_path / "law", 1))
    with pytest.raises(Unavailable, match="no room") as caught:
        await actor.load("law", path, False, False)
    assert caught.value.retry_after is not None
    assert await actor.records() == ()
    is_full = False
    digest = str((await actor.load("law", path, False, False)).digest)
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
    assert (len(puts), len(live)) == (3, 2)
    await actor.prefetch(digests[0])
    assert (len(puts), len(live)) == (4, 2)
    for name in "123":
        await actor.unload(name, False)
    gc.collect()
    assert len(live) == 0


async def test_a_sum_is_fetched_part_by_part(make: Make, tmp_path: Path) -> None:
    actor = make(fits=1.2)
    digests = []
    for content in (1, 2):
        path = str(write(tmp_path / str(content), content))
        digests.append(str((await actor.load(str(content), path, False, False)).digest))
    parts = await actor.shards(compose([(digests[1], 2.0), (digests[0], 0.5)]))
    assert [shard.digest for (shard,) in parts] == sorted(digests)
    await actor.unload("1", False)
    with pytest.raises(NotFound, match="unloaded"):
        await actor.shards(compose([(digests[1], 2.0), (digests[0], 0.5)]))


async def test_an_adapter_over_the_memory_of_all_is_refused_with_the_numbers(
    make: Make, tmp_path: Path
) -> None:
    memory = RankMemory(tp=1, adapter_item_bytes=4, model_item_bytes=4, adapter_bytes=100)
    actor = make(memory=memory)
    with pytest.raises(InvalidAdapter, match=r"takes \d+ bytes .* have 100 \(adapter_memory\)"):
        await actor.load("law", str(write(tmp_path / "law", 1)), False, False)


async def test_a_read_that_hangs_blocks_no_other_adapter(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    actor = make()
    slow = str(write(tmp_path / "slow", 1))
    whole = actor._reads._reader.whole

    def hang(source: Any) -> Any:
        if source.path == slow:
            gate.wait(PATIENCE)
        return whole(source)

    monkeypatch.setattr(actor._reads._reader, "whole", hang)
    loading = asyncio.create_task(actor.load("slow", slow, False, False))
    fast = str(write(tmp_path / "fast", 2))
    digest = str((await actor.load("fast", fast, False, False)).digest)
    assert len(await actor.shards(digest)) == 1
    await actor.unload("fast", False)
    assert not loading.done()
    gate.set()
    assert (await loading).name == "slow"


async def test_of_two_loads_of_one_name_the_last_to_come_wins(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    actor = make()
    paths = [str(write(tmp_path / str(content), content)) for content in (1, 2)]
    whole = actor._reads._reader.whole

    def slow_first(source: Any) -> Any:
        if source.path == paths[0]:
            gate.wait(PATIENCE)
        return whole(source)

    monkeypatch.setattr(actor._reads._reader, "whole", slow_first)
    first = asyncio.create_task(actor.load("law", paths[0], True, False))
    await calm()
    second = asyncio.create_task(actor.load("law", paths[1], True, False))
    await calm()
    gate.set()
    assert [(await one).version for one in (first, second)] == [1, 2]
    assert (await actor.record("law")).path == paths[1]


async def test_thirty_loads_at_once_all_arrive(make: Make, tmp_path: Path) -> None:
    actor = make()
    paths = [str(write(tmp_path / f"a{n}", n)) for n in range(30)]
    records = await asyncio.gather(
        *(actor.load(f"a{n}", path, False, n == 29) for n, path in enumerate(paths))
    )
    assert len({record.digest for record in records}) == 30
    again = await asyncio.gather(
        *(actor.load("a0", paths[0], False, False) for _ in range(5)), return_exceptions=True
    )
    assert [type(one) for one in again] == [InvalidRequest] * 5
    actor._pool.check()


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
    assert [address.replica for address in await actor.schedulers()] == ["down", "fine", "hung"]


async def test_a_replica_that_comes_late_or_again_hears_what_is_pinned(
    make: Make, tmp_path: Path
) -> None:
    replica = Replica()
    actor = make(replica)
    digest = (await actor.load("law", str(write(tmp_path / "law", 1)), False, True)).digest
    await actor.attach(replica.address)
    assert list(replica.pinned) == [digest]
    replica.pinned = {}
    await actor.detach("0")
    await actor.attach(replica.address)
    assert list(replica.pinned) == [digest]
    await actor.detach("0")
    assert await actor.schedulers() == ()


# Directories of adapters.


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
    await actor._watch.poll()
    assert [record.name for record in await actor.records()] == ["a", "c"]
    assert (await actor.resolve("a", "")).version == 2
    assert (await actor.rollback("a", None)).digest == first
    await actor._watch.poll()
    assert (await actor.resolve("a", "")).digest == first
    shutil.rmtree(adapters / "a")
    await actor._watch.poll()
    await calm()
    with pytest.raises(NotFound):
        await actor.resolve("a", "")
    assert len(replica.unloaded) == 2
    actor._pool.check()


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
    await actor._watch.poll()
    assert (await actor.resolve("law", "")).digest == digest
    assert "truncated" in actor._watch.refused["law"]
    write(law, 2)
    await actor._watch.poll()
    assert actor._watch.refused == {}
    assert (await actor.resolve("law", "")).version == 2


async def test_touching_a_directory_without_changing_it_is_no_new_version(
    make: Make, tmp_path: Path
) -> None:
    law = write(tmp_path / "law", 1)
    actor = make(adapter_dirs=(str(tmp_path),), poll_interval=3600)
    await actor.start({})
    await actor.resolve("law", "")
    os.utime(law / "adapter_model.safetensors", ns=(1, 1))
    await actor._watch.poll()
    assert (await actor.record("law")).version == 1


async def test_calls_go_before_directories(make: Make, tmp_path: Path) -> None:
    adapters, other = tmp_path / "adapters", write(tmp_path / "other", 9)
    write(adapters / "law", 1)
    actor = make(adapter_dirs=(str(adapters),), poll_interval=3600)
    await actor.start({})
    record = await actor.load("law", str(other), True, False)
    assert (record.watched, record.path) == (False, str(other))
    write(adapters / "law", 2)
    await actor._watch.poll()
    assert (await actor.record("law")).path == str(other)
    await actor.unload("law", False)
    await actor._watch.poll()
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
    await actor._watch.poll()
    with pytest.raises(NotFound):
        await actor.resolve("law", "")
    os.utime(law / "adapter_config.json", ns=(1, 1))
    await actor._watch.poll()
    assert (await actor.resolve("law", "")).version == 2


async def test_a_directory_of_adapters_that_cannot_be_listed_takes_nothing_away(
    make: Make, tmp_path: Path
) -> None:
    adapters = tmp_path / "adapters"
    write(adapters / "law", 1)
    actor = make(adapter_dirs=(str(adapters),), poll_interval=3600)
    await actor.start({})
    adapters.rename(tmp_path / "away")
    await actor._watch.poll()
    assert [record.name for record in await actor.records()] == ["law"]
    (tmp_path / "away").rename(adapters)
    await actor._watch.poll()
    assert (await actor.resolve("law", "")).version == 1


async def test_the_loop_finds_a_new_directory_by_itself(make: Make, tmp_path: Path) -> None:
    actor = make(adapter_dirs=(str(tmp_path),), poll_interval=0.01)
    await actor.start({})
    write(tmp_path / "law", 1)
    async with asyncio.timeout(PATIENCE):
        while not await actor.records():
            await asyncio.sleep(0.01)


# Confinement.


async def test_nothing_outside_of_the_roots_is_read(make: Make, tmp_path: Path) -> None:
    root, outside = tmp_path / "root", write(tmp_path / "outside", 1)
    inside = write(root / "inside", 2)
    (root / "link").symlink_to(outside)
    (root / "files").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (root / "files" / name).symlink_to(outside / name)
    actor = make(adapter_roots=(str(root),))
    for path in (
        outside,
        root / "link",
        root / "files",
        root / ".." / "outside",
        root / "link" / ".." / "outside",
        Path("/etc"),
        tmp_path / "nothing there",
        tmp_path / "root-with-another-name",
    ):
        with pytest.raises(InvalidAdapter, match="outside of the directories"):
            await actor.load("law", str(path), False, False)
    (root / "alias").symlink_to(inside)
    for number, path in enumerate((inside, root / "alias", root / "files" / ".." / "inside")):
        await actor.load(f"a{number}", str(path), False, False)


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


async def test_a_router_enters_its_counts_and_learns_what_it_shall_forget(
    make: Make, tmp_path: Path
) -> None:
    pool: Any = make()
    await pool.load("kept", str(write(tmp_path / "a", 1)), False, False)
    counts = RouterCounts("r", 1, {}, {}, {"kept": ("kept",), "kept+gone": ("gone", "kept")}, 0)
    assert await pool.enter(counts, False) == Page(("gone",))
    with pytest.raises(NotFound):
        await pool.load("lost", str(tmp_path / "nowhere"), False, False)
    page = await pool.enter(counts, True)
    assert [report.counts for report in page.routers] == [counts]
    assert page.pool.reads == {"ok": 1, "failed": 1}
    assert page.pool.read_seconds.number == 1
    assert 0 < page.pool.host_bytes <= page.pool.host_budget
