"""What tenants may hold in a pool over real files: calls at once, restarts, old states."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.adapters.saved_state import encode, name_entry
from cluster.adapters.state_file import StateFile
from cluster.errors import Forbidden
from cluster.tenancy.owners import Caller, HoldingLimits, Owner
from tests.cluster.adapters.service.pools import Make, size, write
from tests.cluster.adapters.service.test_pool_recovery import restart

__all__ = ["restart"]

ACME = Caller(Owner("acme", "k"), HoldingLimits(max_adapters=3, max_pinned=1))


async def test_calls_at_once_load_no_more_than_the_limit(make: Make, tmp_path: Path) -> None:
    actor: Any = make()
    paths = [str(write(tmp_path / f"a{content}", content)) for content in range(12)]
    outcomes = await asyncio.gather(
        *(
            actor.load(f"a{n}", path, False, n % 2 == 0, None, None, ACME)
            for n, path in enumerate(paths)
        ),
        return_exceptions=True,
    )
    loaded = [one for one in outcomes if not isinstance(one, BaseException)]
    assert len(loaded) == 3 and sum(one.pinned for one in loaded) <= 1
    assert all(isinstance(one, Forbidden) for one in outcomes if one not in loaded)
    actor._catalog.check()
    for record in loaded:
        await actor.unload(record.name, False)
    assert (await actor.load("new", paths[0], False, True, None, None, ACME)).owner == ACME.owner


async def test_bytes_of_calls_at_once_stay_below_the_limit(make: Make, tmp_path: Path) -> None:
    actor: Any = make()
    who = Caller(Owner("acme", "k"), HoldingLimits(max_adapter_bytes=int(2.5 * size())))
    paths = [str(write(tmp_path / f"a{content}", content)) for content in range(8)]
    outcomes = await asyncio.gather(
        *(actor.load(f"a{n}", path, False, False, None, None, who) for n, path in enumerate(paths)),
        return_exceptions=True,
    )
    assert sum(not isinstance(one, BaseException) for one in outcomes) == 2
    refused = next(one for one in outcomes if isinstance(one, Forbidden))
    assert f"the limit is {int(2.5 * size())}, and {2 * size()} are held" in str(refused)


async def test_an_upload_is_refused_before_its_bytes_come(make: Make, tmp_path: Path) -> None:
    actor: Any = make(staging=str(tmp_path / "staged"))
    await actor.start({})
    who = Caller(Owner("acme", "k"), HoldingLimits(max_adapters=1))
    await actor.load("a", str(write(tmp_path / "a", 1)), False, False, None, None, who)
    with pytest.raises(Forbidden, match="the limit is 1"):
        await actor.begin_upload("b", False, None, who)
    await actor.abort_upload(await actor.begin_upload("a", True, None, who))


async def test_a_restart_forgets_nobodys_account(
    restart: Callable[..., Any], tmp_path: Path
) -> None:
    actor = await restart()
    paths = [str(write(tmp_path / f"a{content}", content)) for content in range(5)]
    for number in range(3):
        await actor.load(f"a{number}", paths[number], False, number == 0, None, None, ACME)
    actor = await restart()
    assert {record.owner for record in await actor.records()} == {ACME.owner}
    with pytest.raises(Forbidden, match="3 are held"):
        await actor.load("new", paths[3], False, False, None, None, ACME)
    with pytest.raises(Forbidden, match="1 are held"):
        await actor.pin("a1", ACME)
    await actor.unload("a0", False)
    actor = await restart()
    await actor.pin("a1", ACME)
    await actor.load("new", paths[3], False, False, None, None, ACME)
    actor._catalog.check()


async def test_a_state_from_before_there_were_owners_is_read_and_counts_for_nobody(
    restart: Callable[..., Any], tmp_path: Path
) -> None:
    actor = await restart()
    path = str(write(tmp_path / "a", 1))
    await actor.load("a", path, False, True, None, None, ACME)
    await actor.close()
    file = StateFile(tmp_path / "state")
    saved = dict(file.entries[name_entry("a")])
    assert saved.pop("owner") == saved.pop("pinned_by") == encode(ACME.owner)
    file.write({name_entry("a"): json.loads(json.dumps(saved))}, [])
    file.close()
    actor = await restart()
    (record,) = await actor.records()
    assert (record.pinned, record.owner) == (True, None)
    for number in range(3):
        await actor.load(f"b{number}", path, False, number == 0, None, None, ACME)
    actor._catalog.check()
