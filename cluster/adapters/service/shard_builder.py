"""From an adapter that was read to shards in shared memory, one for each rank.

Finds what an adapter takes, in host memory and on the device, and refuses one that no device could
hold. Blocks, so call it in a thread; several threads may.
"""

from collections.abc import Callable
from typing import Any

from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from cluster.adapters.adapter import Adapter
from cluster.adapters.contents import LoadedAdapter
from cluster.adapters.peft.checks import PARAM
from cluster.adapters.records import Facts, Outline
from cluster.adapters.shards import RankMemory, cut_all
from cluster.errors import InvalidAdapter, Unavailable
from worker.lora.memory import claimed_bytes
from worker.weights.partition import partition

STORE_RETRY_SECONDS = 5


class ShardBuilder:
    """Cuts adapters for one kind of group; `put` takes a shard to shared memory.

    `put` returns a handle; the memory is freed when the last copy of the handle is gone.
    """

    def __init__(self, memory: RankMemory, put: Callable[[Any], Any]) -> None:
        self._memory = memory
        self._put = put

    def load(self, outline: Outline, adapter: Adapter) -> LoadedAdapter:
        """Cut an adapter.

        Raises:
            InvalidAdapter: if it takes more than the device memory of all adapters together.
            Unavailable: if there is no room for its shards.
        """
        memory = self._memory
        shards = cut_all(adapter, memory.tp)
        claims = [
            claimed_bytes(
                shard,
                partition(adapter.model, memory.tp, shard.rank),
                memory.adapter_item_bytes,
                memory.model_item_bytes,
            )
            for shard in shards
        ]
        device_bytes = max(claims)
        if memory.adapter_bytes is not None and device_bytes > memory.adapter_bytes:
            raise InvalidAdapter(
                f"adapter {adapter.path}: it takes {device_bytes} bytes on a rank, and all "
                f"adapters together have {memory.adapter_bytes} (adapter_memory)",
                PARAM,
            )
        try:
            handles = tuple(self._put(shard) for shard in shards)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            raise Unavailable(
                f"no room for the shards of an adapter: {type(error).__name__}",
                retry_after=STORE_RETRY_SECONDS,
            ) from error
        facts = Facts(
            digest=adapter.digest,
            outline=outline,
            host_bytes=sum(shard.data.nbytes for shard in shards),
            device_bytes=device_bytes,
            stands_alone=any(module.magnitude is not None for module in adapter.modules),
        )
        return LoadedAdapter(facts, handles)
