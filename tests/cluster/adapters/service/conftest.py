"""A pool actor over real directories."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.pins import Limits
from cluster.adapters.service.pool_actor import AdapterPoolActor, AdapterPoolConfig
from tests.cluster.adapters.service.pools import Make, size
from tests.cluster.adapters.service.replicas import Replica, connector
from tests.cluster.adapters.tiny import LIMITS, MEMORY, MODEL


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
