"""The pool follows a configuration that changes while it serves."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.pins import Limits
from cluster.adapters.service.pool_actor import AdapterPoolActor, AdapterPoolConfig
from tests.cluster.adapters.service.replicas import Replica, connector
from tests.cluster.adapters.tiny import LIMITS, MEMORY, MODEL, tiny_adapter


def write(folder: Path, content: int) -> str:
    return str(tiny_adapter("q_proj", "v_proj", seed=content).write(folder))


@pytest.fixture
async def actor() -> AsyncIterator[AdapterPoolActor]:
    config = AdapterPoolConfig(model=MODEL, limits=LIMITS, memory=MEMORY, poll_interval=1000.0)
    catalog = AdapterCatalog("tiny", Limits(host_bytes=2**30, num_slots=4))
    made = AdapterPoolActor(config, catalog, connector(Replica()), lambda x: x)
    yield made
    await made.close()


async def names(actor: AdapterPoolActor) -> list[str]:
    return [record.name for record in await actor.records()]


async def test_what_joins_the_list_is_served_and_what_leaves_it_is_not(
    actor: AdapterPoolActor, tmp_path: Path
) -> None:
    law, art = write(tmp_path / "law", 1), write(tmp_path / "art", 2)
    await actor.start({"law": law})
    assert await actor.follow({"law": law, "art": art}, ()) == {}
    assert await names(actor) == ["art", "law"]
    await actor.resolve("law", "")
    await actor.follow({"art": art}, ())
    assert await names(actor) == ["art"]


async def test_another_directory_or_another_content_is_a_new_version(
    actor: AdapterPoolActor, tmp_path: Path
) -> None:
    await actor.start({"law": write(tmp_path / "one", 1)})
    first = (await actor.resolve("law", "")).digest
    await actor.follow({"law": write(tmp_path / "two", 2)}, ())
    moved = await actor.resolve("law", "")
    assert (moved.version, moved.digest != first) == (2, True)
    write(tmp_path / "two", 3)
    await actor.follow({"law": str(tmp_path / "two")}, ())
    assert (await actor.resolve("law", "")).version == 3
    await actor.follow({"law": str(tmp_path / "two")}, ())
    assert (await actor.resolve("law", "")).version == 3


async def test_what_calls_have_loaded_unloaded_or_changed_stays(
    actor: AdapterPoolActor, tmp_path: Path
) -> None:
    law, art = write(tmp_path / "law", 1), write(tmp_path / "art", 2)
    other = write(tmp_path / "other", 3)
    listed = {"law": law, "art": art, "old": art}
    await actor.start(listed)
    await actor.load("called", other, False, False)
    await actor.load("law", other, True, False)
    await actor.unload("art", False)
    await actor.load("old", other, True, False)
    await actor.follow({"law": law, "art": art, "new": art}, ())
    assert await names(actor) == ["called", "law", "new", "old"]
    assert (await actor.record("law")).path == other


async def test_an_entry_that_cannot_be_served_leaves_the_rest_alone(
    actor: AdapterPoolActor, tmp_path: Path
) -> None:
    law, art = write(tmp_path / "law", 1), write(tmp_path / "art", 2)
    await actor.start({"law": law})
    (tmp_path / "empty").mkdir()
    refused = await actor.follow({"law": str(tmp_path / "empty"), "tiny": law, "art": art}, ())
    assert refused.keys() == {"law", "tiny"}
    assert "adapter_config.json is missing" in refused["law"]
    assert await names(actor) == ["art", "law"]
    assert (await actor.record("law")).path == law
    assert await actor.follow({"law": law, "art": art}, ()) == {}


async def test_directories_of_adapters_come_and_go(actor: AdapterPoolActor, tmp_path: Path) -> None:
    write(tmp_path / "many" / "a", 1)
    write(tmp_path / "more" / "b", 2)
    await actor.start({})
    await actor.load("called", write(tmp_path / "called", 3), False, False)
    await actor.follow({}, (str(tmp_path / "many"), str(tmp_path / "more")))
    assert await names(actor) == ["a", "b", "called"]
    await actor.follow({}, (str(tmp_path / "more"),))
    assert await names(actor) == ["b", "called"]
    write(tmp_path / "more" / "late", 4)
    assert (await actor.resolve("late", "")).version == 1
    await actor.follow({}, ())
    assert await names(actor) == ["called"]


async def test_a_drained_cluster_stays_drained_for_routers_that_come_later(
    actor: AdapterPoolActor,
) -> None:
    assert not await actor.is_drained()
    await actor.drain()
    assert await actor.is_drained()
