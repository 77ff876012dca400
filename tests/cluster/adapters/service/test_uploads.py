"""Adapters that are uploaded to the pool: versions as any others, whose files it keeps itself."""

import asyncio
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from cluster.adapters.peft.checks import WEIGHTS
from cluster.adapters.records import LoadOptions
from cluster.adapters.sources import uploads
from cluster.errors import InvalidAdapter, InvalidRequest, NotFound, Overloaded, Unavailable
from tests.cluster.adapters.service.pools import Make, digest_of, eventually, write
from tests.cluster.adapters.service.replicas import Replica
from tests.cluster.adapters.sources.uploading import (
    files_of,
    names_in,
    staged,
    upload,
    with_config_inside,
)

Start = Callable[..., Any]


@pytest.fixture
def start(make: Make, tmp_path: Path) -> Start:
    """Return a function that ends the last pool and starts another one over the same files."""
    before: list[Any] = []

    async def again(*replicas: Replica, **more: Any) -> Any:
        for actor in before:
            await actor.close()
        before.clear()
        more = {"state": str(tmp_path / "state"), "staging": str(tmp_path / "staged")} | more
        before.append(make(*replicas, load_gap=0, silence=0.05, **more))
        await before[0].start({})
        for replica in replicas:
            await before[0].attach(replica.address)
        return before[0]

    return again


async def test_an_upload_is_served_as_a_version_and_its_files_lie_in_the_staging_folder(
    start: Start, tmp_path: Path
) -> None:
    actor = await start(Replica())
    record = await upload(actor, "law", *files_of(1), load_inplace=False)
    assert (record.version, record.digest) == (1, digest_of(tmp_path, 1))
    assert staged(tmp_path / "staged") == {Path(record.path).name}
    resolved = await actor.resolve("law", "any")
    ((shard,),) = await actor.shards(resolved.digest)
    assert shard.digest == record.digest


async def test_the_configuration_may_come_in_the_header_of_the_weights(
    start: Start, tmp_path: Path
) -> None:
    actor = await start()
    record = await upload(actor, "law", None, with_config_inside(1))
    assert record.digest == digest_of(tmp_path, 1)
    for config, weights in ((None, files_of(1)[1]), (None, b"\x80\x04K\x01."), (None, b"")):
        with pytest.raises(InvalidAdapter):
            await upload(actor, "other", config, weights)
    assert staged(tmp_path / "staged") == {Path(record.path).name}


async def test_a_taken_name_is_refused_before_anything_is_sent(
    start: Start, tmp_path: Path
) -> None:
    actor = await start()
    await upload(actor, "law", *files_of(1))
    with pytest.raises(InvalidRequest, match="already been loaded"):
        await actor.begin_upload("law", False, 10)
    with pytest.raises(InvalidRequest, match="cannot name an adapter"):
        await actor.begin_upload("../law", False, 10)
    assert len(staged(tmp_path / "staged")) == 1


@pytest.mark.parametrize("fault", ["truncated", "nan", "config", "checksum"])
async def test_a_damaged_upload_leaves_the_old_version_serving_and_no_files(
    start: Start, tmp_path: Path, fault: str
) -> None:
    actor = await start(Replica())
    before = await upload(actor, "law", *files_of(1))
    config, weights = files_of(2)
    checksum = None
    if fault == "truncated":
        weights = weights[:-10]
    elif fault == "nan":
        weights = weights[:-4] + b"\x00\x00\xc0\x7f"
    elif fault == "config":
        config = b"{"
    else:
        checksum = sha256(b"something else").hexdigest()
    with pytest.raises(InvalidAdapter):
        await upload(actor, "law", config, weights, sha256=checksum)
    assert await actor.record("law") == before
    await actor._staged.idle()
    assert staged(tmp_path / "staged") == {Path(before.path).name}


async def test_a_checksum_is_compared_with_the_weights(start: Start) -> None:
    actor = await start()
    config, weights = files_of(1)
    checksum = sha256(weights).hexdigest()
    assert (await upload(actor, "law", config, weights, sha256=checksum.upper())).version == 1


async def test_files_are_kept_for_every_version_that_is_kept_and_no_longer(
    start: Start, tmp_path: Path
) -> None:
    actor = await start(Replica())
    paths = []
    for content in range(8):
        paths.append(Path((await upload(actor, "law", *files_of(content))).path).name)
        await actor._staged.idle()
    await eventually(lambda: names_in(tmp_path / "staged") == set(paths[-4:]))
    record = await actor.rollback("law", 5)
    assert record.digest == digest_of(tmp_path / "scratch", 4)
    await actor.unload("law", False)
    await eventually(lambda: names_in(tmp_path / "staged") == set())


async def test_files_stay_while_a_request_runs_on_them(start: Start, tmp_path: Path) -> None:
    replica = Replica()
    actor = await start(replica)
    record = await upload(actor, "law", *files_of(1))
    resolved = await actor.resolve("law", "any")
    replica.lease(resolved.digest)
    unloading = asyncio.create_task(actor.unload("law", False))
    await asyncio.sleep(0.05)
    await actor._staged.idle()
    assert staged(tmp_path / "staged") == {Path(record.path).name}
    replica.release(resolved.digest)
    await unloading
    await eventually(lambda: names_in(tmp_path / "staged") == set())


async def test_the_same_bytes_under_two_names_lie_there_once_until_both_are_gone(
    start: Start, tmp_path: Path
) -> None:
    actor = await start(Replica())
    for name in ("law", "art"):
        await upload(actor, name, *files_of(1))
    assert len(staged(tmp_path / "staged")) == 1
    await actor.unload("law", False)
    await actor._staged.idle()
    assert len(staged(tmp_path / "staged")) == 1
    assert (await actor.record("art")).tier == "host"
    await actor.unload("art", False)
    await eventually(lambda: names_in(tmp_path / "staged") == set())


async def test_uploads_outlive_the_process_even_where_calls_may_load_from_nowhere(
    start: Start, tmp_path: Path
) -> None:
    roots = (str(tmp_path / "nowhere"),)
    actor = await start(Replica(), adapter_roots=roots)
    for content in (1, 2):
        record = await upload(actor, "law", *files_of(content), pinned=True)
    replica = Replica()
    actor = await start(replica, adapter_roots=roots)
    assert (await actor.record("law")).digest == record.digest
    ((shard,),) = await actor.shards((await actor.resolve("law", "any")).digest)
    assert shard.digest == record.digest
    assert (await actor.rollback("law", 1)).digest == digest_of(tmp_path / "scratch", 1)
    assert len(staged(tmp_path / "staged")) == 2


async def test_a_start_deletes_what_was_left_by_the_dead_and_nothing_of_others(
    start: Start, tmp_path: Path
) -> None:
    actor = await start()
    kept = await upload(actor, "law", *files_of(1))
    half = await actor.begin_upload("art", False, None)
    await actor.upload_piece(half, 0, b"half")
    folder = tmp_path / "staged"
    (folder / ("0" * 64)).mkdir()
    (folder / "incoming-77").mkdir()
    (folder / "notes.txt").write_text("the operator's own")
    actor = await start()
    await actor._staged.idle()
    found = {path.name for path in folder.iterdir()}
    assert found == {Path(kept.path).name, "notes.txt", ".lock"}
    with pytest.raises(Unavailable, match="send it again"):
        await actor.upload_piece(half, 4, b"more")


async def test_a_pool_without_a_state_begins_with_an_empty_folder(
    start: Start, tmp_path: Path
) -> None:
    actor = await start(state=None)
    await upload(actor, "law", *files_of(1))
    actor = await start(state=None)
    await actor._staged.idle()
    assert staged(tmp_path / "staged") == set()
    with pytest.raises(NotFound):
        await actor.record("law")


async def test_two_servers_cannot_use_one_folder(
    start: Start, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.adapters.sources.staged.LOCK_TIMEOUT", 0.1)
    await start()
    other = make(staging=str(tmp_path / "staged"))
    with pytest.raises(Unavailable, match="another process uses"):
        await other.start({})
    with pytest.raises(Unavailable):
        await upload(other, "law", *files_of(1))


async def test_size_and_number_are_bounded(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, weights = files_of(1)
    actor = await start(max_upload=len(weights) - 1)
    with pytest.raises(InvalidAdapter, match="max_upload"):
        await actor.begin_upload("law", False, len(weights))
    with pytest.raises(InvalidAdapter, match="max_upload"):
        upload_id = await actor.begin_upload("law", False, None)  # says nothing, and sends more
        await actor.upload_piece(upload_id, 0, weights)
    await actor.abort_upload(upload_id)
    began = await asyncio.gather(
        *(actor.begin_upload(f"a{n}", False, None) for n in range(uploads.MAX_UPLOADS + 3)),
        return_exceptions=True,
    )
    refused = [one for one in began if isinstance(one, BaseException)]
    assert len(refused) == 3 and all(isinstance(one, Overloaded) for one in refused)
    for one in began:
        if isinstance(one, str):
            await actor.abort_upload(one)
    assert staged(tmp_path / "staged") == set()


async def test_pieces_that_are_lost_or_come_twice_are_noticed(start: Start) -> None:
    actor = await start()
    upload_id = await actor.begin_upload("law", False, None)
    await actor.upload_piece(upload_id, 0, b"12345678")
    for offset in (0, 9):
        with pytest.raises(Unavailable, match="send it again"):
            await actor.upload_piece(upload_id, offset, b"9")


async def test_what_a_router_has_left_is_deleted_after_a_while(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "IDLE_SECONDS", 0.05)
    actor = await start()
    upload_id = await actor.begin_upload("law", False, None)
    await actor.upload_piece(upload_id, 0, b"half")
    await eventually(lambda: not list((tmp_path / "staged").glob("incoming-*")))
    with pytest.raises(Unavailable, match="send it again"):
        await actor.upload_piece(upload_id, 4, b"more")
    await actor.abort_upload(upload_id)  # nothing happens


async def test_a_pool_without_a_folder_takes_no_uploads(start: Start) -> None:
    actor = await start(staging=None)
    with pytest.raises(InvalidRequest, match="adapter_staging"):
        await actor.begin_upload("law", False, None)


async def test_tensors_in_shared_memory_are_copied_from_where_that_is_allowed(
    start: Start, tmp_path: Path
) -> None:
    folder = write(tmp_path / "trainer", 3)
    config, _ = files_of(3)
    actor = await start(adapter_roots=(str(tmp_path / "trainer"),))
    file = str(folder / WEIGHTS)
    record = await actor.load_tensors("law", file, config, LoadOptions(True))
    assert record.digest == digest_of(tmp_path, 3)
    own = str(tmp_path / "acme")
    with pytest.raises(InvalidAdapter, match="outside"):
        await actor.load_tensors("law", file, config, LoadOptions(True, root=own))
    (folder / WEIGHTS).unlink()
    assert len(staged(tmp_path / "staged")) == 1
    for other in ("/dev/shm/../../etc/passwd", "/etc/passwd", str(tmp_path / "trainer" / "none")):
        with pytest.raises(InvalidAdapter):
            await actor.load_tensors("law", other, config, LoadOptions(True))
    actor = await start()  # no roots: /dev/shm only
    with pytest.raises(InvalidAdapter, match="outside"):
        await actor.load_tensors("law", file, config, LoadOptions(True))
    assert not list((tmp_path / "staged").glob("incoming-*"))


async def test_bytes_that_come_again_while_the_last_name_of_them_goes_are_not_deleted(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = await start(Replica())
    await upload(actor, "law", *files_of(1))
    whole = actor._threads.whole

    async def slowly(source: Any) -> Any:
        await actor.unload("law", False)
        await asyncio.sleep(0.05)
        return await whole(source)

    monkeypatch.setattr(actor._threads, "whole", slowly)
    record = await upload(actor, "art", *files_of(1))
    await actor._staged.idle()
    assert staged(tmp_path / "staged") == {Path(record.path).name}


async def test_an_upload_is_not_deleted_while_a_request_and_no_name_needs_it_after_a_restart(
    start: Start, tmp_path: Path
) -> None:
    replica = Replica()
    actor = await start(replica)
    record = await upload(actor, "law", *files_of(1))
    replica.lease(str(record.digest))
    unloading = asyncio.create_task(actor.unload("law", False))
    await asyncio.sleep(0.05)
    unloading.cancel()
    actor = await start(replica)
    await actor._staged.idle()
    ((shard,),) = await actor.shards(str(record.digest))
    assert shard.digest == record.digest
    replica.release(str(record.digest))
    await eventually(lambda: names_in(tmp_path / "staged") == set())


async def test_what_arrives_at_a_time_is_bounded_and_has_room_again_when_something_has_come(
    start: Start, tmp_path: Path
) -> None:
    config, weights = files_of(1)
    actor = await start(Replica(), max_upload=len(weights))
    first, second = [await actor.begin_upload(name, False, None) for name in ("a", "b")]
    await actor.upload_piece(first, 0, weights)
    await actor.upload_piece(second, 0, weights[:-10])
    with pytest.raises(Overloaded, match="bytes of adapters are arriving"):
        await actor.begin_upload("c", False, len(weights))
    third = await actor.begin_upload("c", False, None)
    with pytest.raises(Overloaded) as caught:
        await actor.upload_piece(third, 0, weights[:11])
    assert caught.value.retry_after == 5
    await actor.finish_upload(first, "a", config, LoadOptions())
    await actor.upload_piece(third, 0, weights[:11])
    await actor.abort_upload(second)
    await actor.abort_upload(third)
    assert actor._staged._folder.room._num_held == 0
