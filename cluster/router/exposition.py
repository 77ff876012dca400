"""The Prometheus text: a router's own metrics and what the schedulers report.

Owns the names of the schedulers' metrics. Content is not negotiated: only the plain text format
keeps every name as it is. Knows nothing of how reports are had.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from cluster.adapters.record import AdapterRecord
from cluster.router.adapter_metrics import adapter_families, gauge
from cluster.router.schedulers import Report

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

GAUGES = (
    ("requests_running", "Sequences in the running set.", "num_running"),
    ("requests_waiting", "Sequences that wait.", "num_waiting"),
    (
        "requests_waiting_for_adapter",
        "Sequences that wait for a slot or for weights.",
        "num_waiting_for_adapter",
    ),
    ("kv_blocks_total", "KV pages.", "total_pages"),
    ("kv_blocks_free", "KV pages without content.", "free_pages"),
    ("kv_blocks_cached", "KV pages that only the prefix cache holds.", "cached_pages"),
    ("kv_blocks_held", "KV pages that sequences hold.", "held_pages"),
    ("kv_host_blocks_total", "KV pages of the host tier.", "total_host_pages"),
    ("kv_host_blocks_free", "KV pages of the host tier without content.", "free_host_pages"),
    ("kv_host_blocks_cached", "KV pages of the host tier with content.", "cached_host_pages"),
    ("adapter_slots_total", "Adapter slots.", "num_slots"),
    ("adapter_memory_total_bytes", "Memory of a rank for adapters in slots.", "adapter_memory"),
    (
        "adapter_slot_wait_bound_steps",
        "Steps that an adapter which joins the line for a slot now waits at most.",
        "slot_wait_bound",
    ),
    (
        "adapter_slot_wait_longest_steps",
        "Steps that an adapter has waited for a slot at most so far.",
        "longest_slot_wait",
    ),
    ("engine_ready", "1 if the ranks are up.", "ready"),
    ("engine_healthy", "1 if the ranks are up and make progress.", "healthy"),
    ("engine_step", "Number of the last step of this group of ranks.", "step"),
)
COUNTERS = (
    ("preemptions", "Sequences whose pages were taken back.", "retractions"),
    ("kv_blocks_evicted", "KV pages evicted from the prefix cache.", "evicted_pages"),
    ("kv_host_blocks_saved", "KV pages copied from device to host.", "saved_pages"),
    ("kv_host_blocks_restored", "KV pages copied from host to device.", "restored_pages"),
    ("kv_host_blocks_evicted", "KV pages evicted from the host tier.", "evicted_host_pages"),
    (
        "forked_sequences",
        "Sequences that began on the pages of another one of their prompt.",
        "forked_sequences",
    ),
    ("adapter_loads", "Adapters loaded into a slot.", "adapter_loads"),
    ("tp_group_restarts", "Restarts of the group of ranks.", "restarts"),
    ("engine_prompt_tokens", "Prompt tokens of admitted sequences.", "prompt_tokens"),
    (
        "engine_cached_prompt_tokens",
        "Prompt tokens found in the prefix cache.",
        "cached_prompt_tokens",
    ),
    ("engine_generation_tokens", "Tokens sampled.", "generated_tokens"),
)


class _OwnMetrics(Collector):
    """A registry's metrics with the router's label, without `_created` series."""

    def __init__(self, registry: CollectorRegistry, router_id: str) -> None:
        self._registry = registry
        self._router_id = router_id

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [
                Sample(sample.name, sample.labels | {"router": self._router_id}, sample.value)
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]
            yield family


class _ClusterMetrics(Collector):
    """What schedulers and the catalogue report."""

    def __init__(
        self, reports: tuple[Report, ...], records: tuple[AdapterRecord, ...], max_labels: int
    ) -> None:
        self._reports = reports
        self._records = records
        self._max_labels = max_labels
        self._statuses = [report.status for report in reports if report.status is not None]

    def collect(self) -> Iterator[Metric]:
        yield gauge(
            "scheduler_up",
            "1 if the scheduler answers.",
            ["replica"],
            (((report.replica,), report.status is not None) for report in self._reports),
        )
        for name, text, field in GAUGES:
            values = (((status.replica,), getattr(status, field)) for status in self._statuses)
            yield gauge(name, text, ["replica"], values)
        for name, text, field in COUNTERS:
            counter = CounterMetricFamily(f"topwork_{name}", text, labels=["replica"])
            for status in self._statuses:
                counter.add_metric([status.replica], getattr(status, field))
            yield counter
        yield from self._derived()
        yield from self._ranks()
        yield from adapter_families(self._records, self._statuses, self._max_labels)

    def _derived(self) -> Iterator[Metric]:
        yield gauge(
            "kv_cache_usage_ratio",
            "Share of KV pages that sequences hold.",
            ["replica"],
            (((s.replica,), s.held_pages / max(1, s.total_pages)) for s in self._statuses),
        )
        yield gauge(
            "adapter_slots_used",
            "Adapter slots that are occupied.",
            ["replica"],
            (((s.replica,), len(s.slots)) for s in self._statuses),
        )
        for name, text, field in (
            ("adapter_memory_claimed_bytes", "Most that adapters in slots may hold.", "claimed"),
            ("adapter_memory_held_bytes", "Bytes that adapters in slots do hold.", "held"),
        ):
            values = (
                ((s.replica,), sum(getattr(slot, f"{field}_bytes") for slot in s.slots))
                for s in self._statuses
            )
            yield gauge(name, f"{text} On the rank that holds most.", ["replica"], values)
        yield gauge(
            "tp_ranks_alive",
            "Ranks whose process lives.",
            ["replica"],
            (((s.replica,), sum(rank.alive for rank in s.ranks)) for s in self._statuses),
        )

    def _ranks(self) -> Iterator[Metric]:
        for name, text, field in (
            ("rank_last_step_age_seconds", "Age of a rank's last step.", "last_step_age"),
            ("rank_weight_bytes", "Bytes of a rank's weights.", "weight_bytes"),
            ("rank_kv_bytes", "Bytes of a rank's KV pages.", "kv_bytes"),
        ):
            yield gauge(
                name,
                text,
                ["replica", "rank"],
                (
                    ((status.replica, str(rank.rank)), getattr(rank, field))
                    for status in self._statuses
                    for rank in status.ranks
                ),
            )


def exposition(
    own: CollectorRegistry,
    router_id: str,
    version: str,
    reports: tuple[Report, ...],
    records: tuple[AdapterRecord, ...],
    max_labels: int,
) -> bytes:
    """Return all metrics as text; at most `max_labels` adapters have series of their own."""
    build = CollectorRegistry()
    Gauge("topwork_build_info", "1.", ["version"], registry=build).labels(version).set(1)
    collectors = (build, _OwnMetrics(own, router_id), _ClusterMetrics(reports, records, max_labels))
    return b"".join(generate_latest(collector) for collector in collectors)
