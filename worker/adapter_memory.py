"""What an adapter will hold on a rank's device, told before it is loaded."""

from worker.adapter_shard import AdapterShard
from worker.partition import Partition


def claimed_bytes(
    shard: AdapterShard, part: Partition, device_item_bytes: int, model_item_bytes: int
) -> int:
    """Return an upper bound of what the form of a shard holds."""
    return shard.data.nbytes * device_item_bytes // 2
