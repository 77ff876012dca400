"""The metrics of adapters and the adapter pool: how many are where, and, of those in use, which.

With thousands of adapters only some have series of their own; the sums are complete.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import Metric

from cluster.adapters.records import AdapterRecord
from cluster.histogram import LOAD_BUCKETS
from cluster.messages import Status
from cluster.metrics_hub import PoolCounts
from cluster.request import parts_of
from cluster.router.metrics.families import counter, gauge, histogram

LEVELS = ("device", "host", "disk", "gone")  # the fastest first

REGISTERED = gauge(
    "adapters_registered", "Adapters in the catalogue, by the best place that they are in.", "level"
)
RESIDENT = gauge(
    "adapter_resident", "1 for the best place an adapter is in.", "adapter", "level", "pinned"
)
INFLIGHT = gauge(
    "adapter_inflight", "Sequences that hold an adapter, alone or in a sum.", "adapter"
)
POOL_UP = gauge("adapter_pool_up", "1 if the adapter pool answers.")
HOST_HELD = gauge("adapter_host_memory_held_bytes", "Bytes of adapters in host memory.")
HOST_TOTAL = gauge("adapter_host_memory_total_bytes", "Host memory for adapters.")
HOST_EVICTIONS = counter("adapter_host_evictions", "Adapters that left host memory for others.")
READS = counter("adapter_reads", "Adapter directories read whole, by result.", "result")
READ_SECONDS = histogram(
    "adapter_read_seconds",
    "From the begin of reading an adapter directory to its shards in host memory.",
    LOAD_BUCKETS,
)
TASK_FAILURES = counter(
    "adapter_pool_task_failures",
    "Ends of the adapter pool's background tasks that must not end; each is begun again.",
    "task",
)


def adapter_families(
    records: Sequence[AdapterRecord], statuses: Iterable[Status], max_labels: int
) -> Iterator[Metric]:
    """Yield the gauges; those at most `max_labels` adapters have series that are most in use."""
    leases: Counter[str] = Counter()  # by digest, in sums too
    on_device: set[str] = set()
    for status in statuses:
        for slot in status.scheduler.slots:
            for digest, _ in parts_of(slot.adapter):
                leases[digest] += slot.leases
            if not slot.loading:
                on_device.add(slot.adapter)

    def level(record: AdapterRecord) -> str:
        return "device" if record.digest in on_device else record.tier

    def disuse(record: AdapterRecord) -> tuple[int, int, str]:
        return -leases[record.digest or ""], LEVELS.index(level(record)), record.name

    counts = Counter(map(level, records))
    yield REGISTERED.metric(((one,), counts[one]) for one in LEVELS)
    shown = sorted(records, key=disuse)[:max_labels]
    yield RESIDENT.metric(((one.name, level(one), str(one.pinned).lower()), 1) for one in shown)
    yield INFLIGHT.metric(((one.name,), leases[one.digest or ""]) for one in shown)


def pool_families(pool: PoolCounts | None) -> Iterator[Metric]:
    """Yield what the adapter pool counts of itself; None if it does not answer."""
    yield POOL_UP.metric([((), pool is not None)])
    if pool is None:
        return
    yield HOST_HELD.metric([((), pool.host_bytes)])
    yield HOST_TOTAL.metric([((), pool.host_budget)])
    yield HOST_EVICTIONS.metric([((), pool.host_evictions)])
    yield READS.metric(((result,), count) for result, count in pool.reads.items())
    yield READ_SECONDS.histogram([((), pool.read_seconds)])
    yield TASK_FAILURES.metric(((task,), count) for task, count in pool.task_failures.items())
