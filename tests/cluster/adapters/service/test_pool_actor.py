"""The pool actor over real directories: loads, first requests, shards, counts."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ObjectStoreFullError

from cluster.adapters.sharding import RankMemory
from cluster.errors import Conflict, InvalidAdapter, InvalidRequest, NotFound, Unavailable
from cluster.metrics_hub import ClusterCounts, RouterCounts
from cluster.request import compose
from cluster.tenancy.leases import Account, AccountState, Claim, LeaseCall
from cluster.tenancy.usage import Usage
from tests.cluster.adapters.service.pools import Make, calm, digest_of, spoil, write
from tests.patience import PATIENCE
from worker.lora.shard import AdapterShard


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


async def test_of_two_loads_of_one_name_the_last_to_come_wins(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    actor = make()
    paths = [str(write(tmp_path / str(content), content)) for content in (1, 2)]
    whole = actor._threads._reader.whole

    def slow_first(source: Any, take: Any) -> Any:
        if source.path == paths[0]:
            gate.wait(PATIENCE)
        return whole(source, take)

    monkeypatch.setattr(actor._threads._reader, "whole", slow_first)
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
    actor._catalog.check()


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


@pytest.mark.parametrize("servers", [(), ("all",), ("all/acme",), ("all/acme/inner", "other")])
async def test_a_caller_with_a_root_of_its_own_loads_from_nowhere_else(
    make: Make, tmp_path: Path, servers: tuple[str, ...]
) -> None:
    own, foreign = tmp_path / "all" / "acme", write(tmp_path / "all" / "umbra", 1)
    inside = write(own / "inner" / "law", 2)
    (own / "inner" / "link").symlink_to(foreign)
    actor = make(adapter_roots=tuple(str(tmp_path / one) for one in servers))
    for path in (foreign, own / "inner" / "link", own / ".." / "umbra", tmp_path / "other"):
        with pytest.raises(InvalidAdapter, match="outside of the directories"):
            await actor.load("acme/x", str(path), False, False, None, str(own))
    with pytest.raises(InvalidAdapter, match="outside of the directories"):
        await actor.load("acme/x", "hf://acme/law", False, False, None, str(own))
    await actor.load("acme/law", str(inside), False, False, None, str(own))


async def test_a_root_that_the_server_may_not_read_is_none(make: Make, tmp_path: Path) -> None:
    folder = write(tmp_path / "acme", 1)
    actor = make(adapter_roots=(str(tmp_path / "served"),))
    with pytest.raises(InvalidAdapter, match="adapter_root of this key lies outside"):
        await actor.load("acme/law", str(folder), False, False, None, str(tmp_path / "acme"))


async def test_a_router_reports_its_counts_and_learns_what_it_shall_forget(
    make: Make, tmp_path: Path
) -> None:
    actor: Any = make()
    await actor.load("kept", str(write(tmp_path / "a", 1)), False, False)
    counts = RouterCounts("r", 1, {}, {}, {"kept": ("kept",), "kept+gone": ("gone", "kept")}, 0)
    assert await actor.report(counts, False) == ClusterCounts(("gone",))
    with pytest.raises(NotFound):
        await actor.load("lost", str(tmp_path / "nowhere"), False, False)
    everything = await actor.report(counts, True)
    assert [report.counts for report in everything.routers] == [counts]
    assert everything.pool.reads == {"ok": 1, "failed": 1}
    assert everything.pool.read_seconds.number == 1
    assert 0 < everything.pool.host_bytes <= everything.pool.host_budget


async def test_a_pin_reads_what_no_request_has_needed_yet_and_lets_the_rest_be(
    make: Make, tmp_path: Path
) -> None:
    actor = make()
    await actor.start({"law": str(write(tmp_path / "law", 1))})
    assert (await actor.record("law")).digest is None
    record = await actor.pin("law")
    assert (record.pinned, record.digest) == (True, digest_of(tmp_path, 1))
    assert [facts.digest for facts in actor._catalog.pinned()] == [record.digest]
    again = await actor.unpin("law")
    assert (again.pinned, again.versions) == (False, record.versions)
    assert actor._catalog.pinned() == ()


async def test_a_pin_of_what_cannot_be_had_any_more_is_a_conflict(
    make: Make, tmp_path: Path
) -> None:
    actor = make()
    await actor.start({"law": str(write(tmp_path / "law", 1))})
    spoil(tmp_path / "law")
    with pytest.raises(Conflict, match="version 1 of 'law' cannot be had.*NaN"):
        await actor.pin("law")
    assert not (await actor.record("law")).pinned
    for call in (actor.pin, actor.unpin):
        with pytest.raises(NotFound, match="nobody"):
            await call("nobody")


async def test_routers_lease_out_of_the_pools_ledger(make: Make) -> None:
    actor = make()
    state = AccountState(Account("key:k", "requests"), 2)
    begun = await actor.lease(LeaseCall("r", 1, "", (), ()))
    claims = (Claim(((0, 2),)), Claim(((0, 1),)))
    reply = await actor.lease(LeaseCall("r", 2, begun.epoch, (state,), claims))
    assert [verdict.refused for verdict in reply.verdicts] == [None, 0]
    other = await make().lease(LeaseCall("r", 1, begun.epoch, (state,), claims))
    assert (other.epoch != begun.epoch, other.verdicts) == (True, ())


async def test_what_routers_report_is_written_down_by_day_and_tenant(
    make: Make, tmp_path: Path
) -> None:
    path = tmp_path / "usage.jsonl"
    for number in (1, 2):  # the second one takes over
        actor = make(usage_file=str(path))
        await actor.start({})
        counts = RouterCounts("r", number, {}, {}, {}, 0, {"acme": Usage(number, 4, 1, 9)})
        await actor.report(counts, False)
        await actor.close()
    (line,) = path.read_text().splitlines()
    assert '"tenant":"acme","requests":2,"computed_prompt_tokens":4,' in line
