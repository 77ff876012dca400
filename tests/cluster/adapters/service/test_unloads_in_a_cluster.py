"""What unloads and failed loads must not leave on schedulers and ranks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.service.pool_actor import AdapterPoolActor
from cluster.errors import NotFound
from cluster.request import BASE, Request
from cluster.router.event_queue import EventQueue
from tests.cluster.engine import life_world
from tests.cluster.engine.life_model import BY_DIGEST, DIGESTS, SIZE, UNUSABLE, Disk
from tests.cluster.engine.life_ranks import Launcher, turns
from tests.cluster.engine.life_world import Replica
from worker.protocol import SamplingParams

GOOD, BAD = 0, 2


@asynccontextmanager
async def cluster(
    tmp_path: Path, num_replicas: int
) -> AsyncIterator[tuple[AdapterCatalog, AdapterPoolActor, list[Replica]]]:
    """Run a pool with an adapter that is good and one that a rank cannot compute."""
    disk, replicas = Disk(tmp_path), []
    catalog, actor = life_world.make_pool(10 * SIZE, 2)
    for name, content in (("good", GOOD), ("bad", BAD)):
        disk.write(name, content)
        await actor.load(name, disk.path(name), False, False)
    for number in range(num_replicas):
        replica = Replica(str(number), Launcher(1, 20, 0, BY_DIGEST, UNUSABLE), actor)
        await replica.start()
        await actor.attach(replica.address)
        replicas.append(replica)
    try:
        yield catalog, actor, replicas
    finally:
        for replica in replicas:
            await replica.close()
        await actor.close()


async def ask(replica: Replica, request_id: str, adapter: str, num_tokens: int = 4) -> str:
    """Return how a request ends: its finish reason, or the name of its error."""
    queue = EventQueue()
    sampling = SamplingParams()
    request = Request(request_id, adapter, (3, 4, 5), sampling, max_tokens=num_tokens)
    replica.client.submit((request,), queue)
    while True:
        for event in await queue.get():
            if event.finish_reason is not None:
                return event.finish_reason if event.error is None else event.error.name


async def test_a_request_that_comes_late_in_an_unload_leaves_nothing_on_its_replica(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, 2) as (catalog, actor, (early, slow)):
        digest = DIGESTS[GOOD]
        assert await ask(early, "a", digest) == "length"
        running = asyncio.create_task(ask(slow, "b", digest, 30))
        while not slow.has(digest):
            await turns(1)
        unloading = asyncio.create_task(actor.unload("good", False))
        while early.has(digest):
            await turns(1)
        await ask(early, "late", digest)  # resolved before the unload; whatever it gets
        assert await running == "length"
        (freed,) = (await unloading).freed
        assert freed.forgotten
        with pytest.raises(NotFound):
            catalog.missing(digest)
        await early.check_rest({DIGESTS[BAD]}, ())


async def test_a_load_that_fails_does_not_leave_the_adapter_before_it_on_a_rank(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, 1) as (_, _, (replica,)):
        assert await ask(replica, "a", DIGESTS[GOOD]) == "length"
        assert await ask(replica, "b", DIGESTS[BAD]) == "InvalidAdapter"
        assert await ask(replica, "c", BASE) == "length"
        await replica.check_rest({DIGESTS[GOOD], DIGESTS[BAD]}, ())
        assert [rank.bank() for rank in replica.launcher.ranks] == [[None], [None]]
