"""The Prometheus text: what all routers count, what schedulers, pool and catalogue report.

Owns what one scrape of any router shows. Content is not negotiated: only the plain text format
keeps every name as it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.adapters.records import AdapterRecord
from cluster.metrics_hub import ClusterCounts
from cluster.router.metrics.adapter_metrics import adapter_families, pool_families
from cluster.router.metrics.aggregation import SILENCE
from cluster.router.metrics.families import Family, gauge
from cluster.router.metrics.request_families import COUNTERS, HISTOGRAMS
from cluster.router.metrics.scheduler_metrics import scheduler_families
from cluster.router.metrics.vllm_names import Endpoint, vllm_families
from cluster.router.replica_set import Report

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

BUILD = gauge("build_info", "1, by version.", "version")
ROUTER_UP = gauge(
    "router_up", "1 if the router has given a sign of life lately; one that ended has none.",
    "router",
)  # fmt: skip
IN_FLIGHT = gauge("router_inflight", "Answers that a router is waiting for.", "router")
KEY_FILE_LOADED = gauge(
    "api_key_file_loaded_timestamp_seconds",
    "When a router read the API keys that count now, in seconds since 1970; without keys, nothing.",
    "router",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything that a router knows of the whole when it is scraped."""

    version: str
    model: str
    page_size: int
    context_length: int
    max_labels: int  # adapters with series of their own
    cluster: ClusterCounts
    reports: tuple[Report, ...]
    records: tuple[AdapterRecord, ...] | None  # None: the catalogue cannot be had
    vllm_time: float | None = None  # seconds since 1970; None: without vLLM's names


class Families(Collector):
    """A view as families."""

    def __init__(self, view: View) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Yield all families, those without series too."""
        view = self._view
        records = view.records or ()
        statuses = [report.status for report in view.reports if report.status is not None]
        yield BUILD.metric([((view.version,), 1)])
        yield from _router_families(view)
        yield from scheduler_families(view.reports)
        yield from pool_families(view.cluster.pool)
        yield from adapter_families(records, statuses, view.max_labels)
        if view.vllm_time is not None:
            routers = [report.counts for report in view.cluster.routers]
            endpoint = Endpoint(view.model, view.page_size, view.context_length, view.max_labels)
            yield from vllm_families(endpoint, records, statuses, routers, view.vllm_time)


def exposition(view: View) -> bytes:
    """Return all metrics as text."""
    registry = CollectorRegistry()
    registry.register(Families(view))
    return generate_latest(registry)


def _router_families(view: View) -> Iterator[Metric]:
    reports = view.cluster.routers
    living = [report for report in reports if not report.counts.has_ended]
    yield ROUTER_UP.metric(((one.counts.router,), one.age < SILENCE) for one in living)
    yield IN_FLIGHT.metric(
        ((one.counts.router,), one.counts.num_in_flight) for one in living if one.age < SILENCE
    )
    yield KEY_FILE_LOADED.metric(
        ((one.counts.router,), one.counts.key_file_loaded)
        for one in living
        if one.age < SILENCE and one.counts.key_file_loaded is not None
    )
    for family in COUNTERS:
        yield family.metric(_series(view, family))
    for family in HISTOGRAMS:
        yield family.histogram(
            ((view.model, one.counts.router), one.counts.histograms[family.name])
            for one in reports
            if family.name in one.counts.histograms
        )


def _series(view: View, family: Family) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield a counter of all routers, without adapters that are not registered any more.

    A router that does not know of it yet may still count them.
    """
    index = family.labels.index("adapter") if "adapter" in family.labels else None
    registered = None if view.records is None else {record.name for record in view.records}
    for counts in (report.counts for report in view.cluster.routers):
        gone = {
            label
            for label, names in counts.adapters.items()
            if registered is not None and not registered.issuperset(names)
        }
        for values, count in counts.counters.get(family.name, ()):
            if index is None or values[index] not in gone:
                yield (*values, counts.router), count
