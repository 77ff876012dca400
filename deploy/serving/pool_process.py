"""The adapter pool's own process.

Apart from the replica that starts it, as it needs nothing of Serve, which takes half a second to
import.
"""

from typing import Any

import ray

from cluster.adapters.service.pool_actor import AdapterPoolActor
from deploy.serving.process_setup import set_log_level


class PoolActor(AdapterPoolActor):
    """The pool as its own process runs it."""

    def __init__(self, log_level: str, *arguments: Any) -> None:
        set_log_level(log_level)
        super().__init__(*arguments)

    @ray.method
    async def set_log_level(self, level: str) -> None:
        """Log more or less from now on."""
        set_log_level(level)


PoolProcess = ray.remote(PoolActor)
