"""The gauges of adapters: how many are where, and, of those in use, which.

With thousands of them only some have series of their own; the sums are complete. Knows nothing of
how records and reports are had.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import Metric

from cluster.adapters.records import AdapterRecord
from cluster.messages import Status
from cluster.router.metrics.families import gauge
from cluster.weighted_adapters import parts_of

LEVELS = ("device", "host", "disk", "gone")  # the best place first

REGISTERED = gauge(
    "adapters_registered", "Adapters in the catalogue, by the best place that they are in.", "level"
)
RESIDENT = gauge(
    "adapter_resident", "1 for the best place an adapter is in.", "adapter", "level", "pinned"
)
INFLIGHT = gauge(
    "adapter_inflight", "Sequences that hold an adapter, alone or in a sum.", "adapter"
)


def adapter_families(
    records: Sequence[AdapterRecord], statuses: Iterable[Status], max_labels: int
) -> Iterator[Metric]:
    """Yield the gauges; those at most `max_labels` adapters have series that are most in use."""
    leases: Counter[str] = Counter()  # by digest, in sums too
    on_device: set[str] = set()
    for status in statuses:
        for slot in status.slots:
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
