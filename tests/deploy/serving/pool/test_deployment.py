"""The pool's replica: one that comes while another runs asks that one for the state file.

The actors are pools over a file, as their own process has them, without the process.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.pins import Limits
from cluster.adapters.service import pool_state
from cluster.adapters.service.pool_actor import AdapterPoolActor, AdapterPoolConfig
from cluster.adapters.service.pool_state import StateInUse
from cluster.errors import Replaced, TopworkError
from deploy.config import ServeConfig
from deploy.serving.pool import deployment
from deploy.serving.pool.deployment import PoolReplica
from tests.cluster.adapters.service.pools import eventually, write
from tests.cluster.adapters.service.replicas import connector
from tests.cluster.adapters.tiny import LIMITS, MEMORY, MODEL

LIVE: dict[str, Any] = {"log_level": "INFO", "adapters": {}, "adapter_dirs": ()}


class Remote:
    """A method as Ray has it."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    async def remote(self, *arguments: object) -> Any:
        try:
            return await self._call(*arguments)
        except TopworkError as error:
            raise RayTaskError("call", "", error) from None


class Process:
    """A pool actor as its handle shows it."""

    def __init__(self, number: int, state: Path) -> None:
        limits = Limits(host_bytes=2**20, num_slots=4)
        config = AdapterPoolConfig(model=MODEL, limits=LIMITS, memory=MEMORY, state=str(state))
        self.pool = AdapterPoolActor(
            config, AdapterCatalog("tiny", limits), connector(), lambda x: x
        )
        self._actor_id = number.to_bytes(8, "little")  # has hex(), as Ray's have

    def __getattr__(self, name: str) -> Remote:
        async def identify() -> int:
            return 0

        return Remote(identify if name == "identify" else getattr(self.pool, name))


class Replica(PoolReplica):
    """One that Serve's worker ends, and not whoever collects garbage."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


class Cluster:
    """Replicas of one deployment over one state file."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.processes: list[Process] = []
        self.replicas: list[PoolReplica] = []

    def start_process(self, *_: object) -> Process:
        self.processes.append(Process(len(self.processes), self.state))
        return self.processes[-1]

    def handle(self, name: str) -> Any:
        """Return the deployment's handle, which calls the replica that runs, or waits for one."""

        class Handle:
            hand_over = Remote(
                self.replicas[0].hand_over if self.replicas else asyncio.Event().wait
            )

        return Handle()

    async def start(self) -> PoolReplica:
        replica = Replica(ServeConfig(model="tiny"))
        await replica.reconfigure(LIVE)
        self.replicas.append(replica)
        return replica


async def names(replica: PoolReplica) -> list[str]:
    """Return what the replica's actor serves."""
    _, actor = await replica.locate("")
    return [record.name for record in await actor.pool.records()]


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path / "state")
    monkeypatch.setattr(pool_state, "LOCK_TIMEOUT", 0.02)
    monkeypatch.setattr(deployment, "HAND_OVER_TIMEOUT", 0.1)
    monkeypatch.setattr(deployment, "set_log_level", lambda level: None)
    monkeypatch.setattr(deployment, "model_fingerprint", lambda config: "model")
    monkeypatch.setattr(deployment, "check_on_this_node", lambda config: config)
    monkeypatch.setattr(Replica, "_start_process", made.start_process)
    monkeypatch.setattr(deployment.serve, "get_deployment_handle", made.handle)
    monkeypatch.setattr(deployment.ray, "kill", lambda actor: None)
    yield made
    for replica in made.replicas:
        await PoolReplica.__del__(replica)
    for process in made.processes:
        await process.pool.close()


async def load(replica: PoolReplica, folder: Path) -> None:
    _, actor = await replica.locate("")
    await actor.pool.load(folder.name, str(write(folder, 1)), False, False)


async def test_a_replica_that_comes_while_another_runs_gets_the_file_and_all_that_it_says(
    cluster: Cluster, tmp_path: Path
) -> None:
    goes = await cluster.start()
    await load(goes, tmp_path / "law")
    comes = await cluster.start()
    assert await names(comes) == ["law"]
    with pytest.raises(Replaced):
        await names(goes)
    processes = len(cluster.processes)
    await eventually(lambda: len(cluster.processes) > processes)  # the one that goes tries again
    await goes.check_health()
    with pytest.raises(Replaced):
        await names(goes)
    await load(comes, tmp_path / "sql")
    assert await names(comes) == ["law", "sql"]


async def test_a_replica_that_has_let_go_of_the_file_goes_on_if_nobody_takes_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    replica = await cluster.start()
    await load(replica, tmp_path / "law")
    _, before = await replica.locate("")
    await asyncio.gather(replica.hand_over(), replica.hand_over())
    with pytest.raises(Replaced):
        await names(replica)
    await replica.reconfigure(LIVE)
    while (await replica.locate(""))[1] is before:
        await asyncio.sleep(0.01)
    assert await names(replica) == ["law"]
    await replica.hand_over()  # and once more, as when Serve tries another node
    with pytest.raises(Replaced):
        await names(replica)


async def test_the_file_of_another_server_is_not_asked_for(
    cluster: Cluster, tmp_path: Path
) -> None:
    other = Process(99, cluster.state)
    await other.pool.start({})
    with pytest.raises(StateInUse, match="each server needs a file of its own"):
        await cluster.start()
    await other.pool.close()
    assert await names(await cluster.start()) == []


async def test_a_bug_while_a_replica_tries_to_go_on_is_told_to_whoever_looks_after_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = await cluster.start()
    await replica.hand_over()

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Replica, "_start_process", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        while True:
            await replica.check_health()
            await asyncio.sleep(0.01)
