"""The adapter pool's own process.

Apart from the replica that starts it, as it needs nothing of Serve, which takes half a second to
import.
"""

import os
from typing import Any

import ray

from cluster.adapters.service.pool_actor import AdapterPoolActor
from deploy.serving.process_setup import set_log_level, yield_cores
from worker.actor import ProcessIdentity, node_ip, start_ticks


class PoolActor(AdapterPoolActor):
    """The pool as its own process runs it."""

    def __init__(self, log_level: str, *arguments: Any) -> None:
        set_log_level(log_level)
        yield_cores()
        super().__init__(*arguments)

    @ray.method
    async def set_log_level(self, level: str) -> None:
        """Log more or less from now on."""
        set_log_level(level)

    @ray.method
    async def identify(self) -> ProcessIdentity:
        """Return which process this is; any answer is a sign of life."""
        ticks = start_ticks(os.getpid())
        assert ticks is not None, "this process runs"
        node_id = ray.get_runtime_context().get_node_id()
        return ProcessIdentity(node_id, node_ip(), os.getpid(), ticks)


PoolProcess = ray.remote(PoolActor)
