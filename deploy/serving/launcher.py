"""Starts and ends the actor processes of a group of ranks, in the scheduler's placement group.

An ended rank is gone for certain: a process that does not end when Ray asks it to is killed by pid.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import Any, cast

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

import worker.actor
from cluster.engine.executor import RankHandle
from deploy.local_model import find_local_model
from deploy.serving.process_setup import ONE_CPU, restore_cpu_priority
from worker.actor import ProcessIdentity, start_ticks
from worker.pools import PageCounts
from worker.protocol import RankConfig, RankInfo


class WorkerActor(worker.actor.WorkerActor):
    """A rank that finds the model on its own node, which may not be the scheduler's."""

    def __init__(
        self, config: RankConfig, secret: bytes, group_timeout: float, on_loopback: bool
    ) -> None:
        restore_cpu_priority()  # and that of the threads that compute, which this one starts
        super().__init__(_with_local_model(config), secret, group_timeout, on_loopback)


def _with_local_model(config: RankConfig) -> RankConfig:
    found = find_local_model(config.model_dir, config.revision)
    if found is None:
        from deploy.models import find_model  # imports the hub's client, which few ranks need

        found = find_model(config.model_dir, config.revision)
    return replace(config, model_dir=str(found))


WorkerProcess = ray.remote(WorkerActor)

END_GRACE = 2.0  # seconds that a process may take to end when it is asked to


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How every rank of a group is started; `rank.rank` is filled in for each."""

    rank: RankConfig
    secret: bytes
    group_timeout: float  # seconds a collective may take
    on_loopback: bool  # whether all ranks share a host, and nobody else is to see what they send


class ActorRank:
    """A rank behind its actor handle."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def rendezvous(self) -> Awaitable[tuple[str, int]]:
        return cast(Awaitable[tuple[str, int]], self.actor.rendezvous.remote())

    def load(self, store: tuple[str, int]) -> Awaitable[RankInfo]:
        return cast(Awaitable[RankInfo], self.actor.load.remote(store))

    def measure_pages(self) -> Awaitable[PageCounts]:
        return cast(Awaitable[PageCounts], self.actor.measure_pages.remote())

    def serve(self, pages: PageCounts, host_pages: PageCounts) -> Awaitable[tuple[str, int]]:
        return cast(Awaitable[tuple[str, int]], self.actor.serve.remote(pages, host_pages))

    def load_adapter(
        self, slot: int, adapter: str, weights: tuple[float, ...], shards: tuple[Any, ...]
    ) -> Awaitable[int]:
        call = self.actor.load_adapter.remote(slot, adapter, weights, list(shards))
        return cast(Awaitable[int], call)

    def clear_slot(self, slot: int, adapter: str) -> Awaitable[None]:
        return cast(Awaitable[None], self.actor.clear_slot.remote(slot, adapter))

    def prepare_grammar(self, grammar: str) -> Awaitable[bool]:
        return cast(Awaitable[bool], self.actor.prepare_grammar.remote(grammar))


class ActorLauncher:
    """Launches ranks as Ray actors, one per bundle after the scheduler's own."""

    def __init__(self, config: LaunchConfig, group: PlacementGroup) -> None:
        self._config = config
        self._group = group
        self._actors: list[Any] = []
        self._identities: list[ProcessIdentity] = []
        self.secret = config.secret

    async def launch(self) -> tuple[RankHandle, ...]:
        """Make one process for each rank and return handles in rank order.

        Raises:
            RayError: if a process does not come up.
        """
        assert not self._actors, "the last group is still there"
        self._actors = [self._start(rank) for rank in range(self._config.rank.tp)]
        calls = (actor.identify.remote() for actor in self._actors)
        self._identities = list(await asyncio.gather(*calls))
        return tuple(ActorRank(actor) for actor in self._actors)

    def _start(self, rank: int) -> Any:
        config = replace(self._config.rank, rank=rank)
        gpus = 1 if config.device == "cuda" else 0
        # Both must be set before torch is imported: spinning thread pools starve each other.
        variables = {
            "OMP_NUM_THREADS": str(config.num_threads or 1),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        if self._config.on_loopback:
            variables["NCCL_SOCKET_IFNAME"] = "lo"
        return WorkerProcess.options(
            num_cpus=0 if gpus else ONE_CPU,
            num_gpus=gpus,
            max_restarts=0,  # one rank alone is of no use: the group is restarted as a whole
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=1 + rank
            ),
            runtime_env={"env_vars": variables},
        ).remote(
            *(config, self._config.secret, self._config.group_timeout, self._config.on_loopback)
        )

    async def kill(self, *, at_once: bool) -> None:
        """End every process of the last launch, with time to end by itself or `at_once`."""
        actors, self._actors = self._actors, []
        identities, self._identities = self._identities, []
        for actor in actors:
            ray.kill(actor)
        # ray.kill asks the process itself, which a stopped one never hears.
        grace = 0.0 if at_once else END_GRACE
        await asyncio.gather(*(_end_on_its_node(identity, grace) for identity in identities))


def end_process(identity: ProcessIdentity, grace: float) -> None:
    """Wait until a process of this node has ended; kill it after so many seconds.

    To kill it at once makes Ray report a crash to whoever reads the server's terminal.
    """
    deadline = time.monotonic() + grace
    while start_ticks(identity.pid) == identity.start_ticks:
        if time.monotonic() > deadline:
            os.kill(identity.pid, signal.SIGKILL)
            return
        time.sleep(0.01)


async def _end_on_its_node(identity: ProcessIdentity, grace: float) -> None:
    if identity.node_id == ray.get_runtime_context().get_node_id():
        await asyncio.to_thread(end_process, identity, grace)
        return
    strategy = NodeAffinitySchedulingStrategy(identity.node_id, soft=False)
    try:
        await (
            ray.remote(end_process)
            .options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
            .remote(identity, grace)
        )
    except RayError:
        return  # the node is gone, and the process with it
