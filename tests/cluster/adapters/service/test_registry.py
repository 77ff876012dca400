"""The scheduler replicas that the pool knows, and what it sends them."""

import asyncio
from pathlib import Path

from cluster.adapters.service.registry import SchedulerRegistry, UnloadTotals
from cluster.messages import SchedulerAddress
from tests.cluster.adapters.service.pools import Make, write
from tests.cluster.adapters.service.replicas import Replica, connector


async def test_an_unload_that_is_not_wanted_any_more_is_not_ordered(tmp_path: Path) -> None:
    replica = Replica()
    registry = SchedulerRegistry(connector(replica), silence=5)
    await registry.attach(replica.address)
    assert await registry.unload("digest", lambda: False, force=True) == UnloadTotals()
    assert replica.unloaded == []
    await registry.unload("digest", lambda: True, force=False)
    assert replica.unloaded == ["digest"]
    registry.close()


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
    assert (await actor.schedulers()).addresses == ()


async def test_routers_hear_for_how_long_a_scheduler_has_been_gone(make: Make) -> None:
    replica = Replica()
    actor = make(replica)
    await actor.attach(replica.address)
    attached = await actor.schedulers()
    assert attached.addresses == (replica.address,) and attached.seconds_since_left is None
    await actor.detach("0")
    left = (await actor.schedulers()).seconds_since_left
    later = (await actor.schedulers()).seconds_since_left
    assert left is not None and later is not None and 0 <= left <= later


async def test_a_replica_that_serves_or_does_not_answer_is_busy() -> None:
    replica = Replica()
    registry = SchedulerRegistry(connector(replica), silence=5)
    assert not await registry.is_busy()
    await registry.attach(replica.address)
    assert not await registry.is_busy()
    replica.lease("a")
    assert await registry.is_busy()
    replica.release("a")
    assert not await registry.is_busy()
    replica.is_hung = True
    assert await registry.is_busy()
    registry.close()


async def test_a_replica_that_died_is_listed_no_more_until_it_attaches_again() -> None:
    replica, other = Replica("0"), Replica("1")
    connections = []
    connect = connector(replica, other)

    async def connect_and_keep(address: SchedulerAddress, on_lost: object) -> object:
        connections.append((connection := await connect(address, on_lost), on_lost))
        return connection

    registry = SchedulerRegistry(connect_and_keep, silence=1.0)  # type: ignore[arg-type]
    for one in (replica, other):
        await registry.attach(one.address)
        await registry.attach(one.address)  # as it does each second
    assert (replica.num_connections, other.num_connections) == (1, 1)
    connection, on_lost = connections[0]
    connection.close("lost")
    on_lost()
    await asyncio.sleep(0.01)
    assert replica.num_connections == 2  # it lives: the connection is opened again
    replica.is_down = True
    connection, on_lost = connections[-1]
    connection.close("lost")
    on_lost()
    await asyncio.sleep(0.01)
    assert registry.addresses == (other.address,)
    replica.is_down = False
    await registry.attach(replica.address)
    assert registry.addresses == (replica.address, other.address)
    registry.close()
