"""The metrics of vLLM that have a meaning here, for its dashboards and for what scales or scores.

Names, types, labels and buckets are vLLM's. One endpoint is all replicas together, as one engine:
scorers and autoscalers take one series of a gauge. A sum of counters falls when one of those that
count ends, so they and histograms have one more label, of who counts. As vLLM's own, the adapters
named are those with requests only; what else is on a device, `topwork_adapter_resident` tells.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from cluster.adapters.records import AdapterRecord
from cluster.histogram import HistogramCounts, regrouped
from cluster.messages import Status
from cluster.metrics_hub import RouterCounts
from cluster.request import parts_of
from cluster.router.metrics import request_families, scheduler_metrics
from cluster.router.metrics.families import Family
from cluster.router.metrics.scheduler_metrics import kv_usage
from cluster.scheduler.stats import SchedulerCounters

ENGINE = "0"  # the one that all replicas are together
LATENCY = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60,
    120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
TOKEN_LATENCY = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What is served, and how much of it is named."""

    model: str
    page_size: int
    context_length: int
    max_labels: int


@dataclass(frozen=True, slots=True)
class Renamed:
    """A histogram of ours under vLLM's name, with its buckets; None: ours are the same."""

    name: str
    ours: str
    bounds: tuple[float, ...] | None = None


SCHEDULER_COUNTERS: tuple[tuple[str, str, Callable[[SchedulerCounters], int]], ...] = (
    ("prompt_tokens", "Prompt tokens, found in the cache or computed.", lambda c: c.prompt_tokens),
    ("prompt_tokens_cached", "Prompt tokens that were found.", lambda c: c.cached_prompt_tokens),
    ("generation_tokens", "Output tokens.", lambda c: c.generated_tokens),
    ("prefix_cache_queries", "Tokens looked for in the cache.", lambda c: c.prompt_tokens),
    ("prefix_cache_hits", "Tokens that were found.", lambda c: c.cached_prompt_tokens),
    ("num_preemptions", "Sequences whose pages were taken back.", lambda c: c.preemptions),
)
SOURCES: tuple[tuple[str, Callable[[SchedulerCounters], int]], ...] = (
    ("local_compute", lambda c: c.prompt_tokens - c.cached_prompt_tokens),
    ("local_cache_hit", lambda c: c.cached_prompt_tokens),
    ("external_kv_transfer", lambda c: 0),
)
SCHEDULER_HISTOGRAMS = (
    Renamed("request_queue_time_seconds", "queue_time_seconds", LATENCY),
    Renamed("request_prefill_time_seconds", "prefill_time_seconds", LATENCY),
    Renamed("request_decode_time_seconds", "decode_time_seconds", LATENCY),
    Renamed("request_inference_time_seconds", "inference_time_seconds", LATENCY),
    Renamed("request_num_preemptions", "request_num_preemptions"),
    Renamed("iteration_tokens_total", "iteration_tokens"),
)
ROUTER_HISTOGRAMS = (
    Renamed("time_to_first_token_seconds", "time_to_first_token_seconds"),
    Renamed("inter_token_latency_seconds", "inter_token_latency_seconds", TOKEN_LATENCY),
    Renamed(
        "request_time_per_output_token_seconds", "time_per_output_token_seconds", TOKEN_LATENCY
    ),
    Renamed("e2e_request_latency_seconds", "e2e_request_latency_seconds", LATENCY),
    Renamed("request_params_n", "request_params_n"),
)
TOKEN_HISTOGRAMS = (  # their buckets end at the context's length
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_max_tokens",
    "request_prefill_kv_computed_tokens",
)
QUEUE_LIMITS = {"scheduler_queue", "router_in_flight"}  # of the reasons of our rejections


def vllm_families(
    endpoint: Endpoint,
    records: Sequence[AdapterRecord],
    statuses: Sequence[Status],
    routers: Sequence[RouterCounts],
    now: float,
) -> Iterator[Metric]:
    """Yield them; `now`, in seconds since 1970, is the value by which scorers find the latest."""
    yield from _gauges(endpoint, statuses)
    yield _adapters(endpoint, records, statuses, now)
    yield from _scheduler_counters(endpoint.model, statuses)
    yield _ended(endpoint.model, routers)
    yield _rejections(endpoint.model, routers)
    counts = [(status.replica, status.histograms) for status in statuses]
    for one in SCHEDULER_HISTOGRAMS:
        family = _family(scheduler_metrics.HISTOGRAMS, one.ours)
        yield _histogram(endpoint.model, one, family, "replica", counts)
    counts = [(router.router, router.histograms) for router in routers]
    tokens = (
        Renamed(name, name, _up_to(endpoint.context_length, name)) for name in TOKEN_HISTOGRAMS
    )
    for one in (*ROUTER_HISTOGRAMS, *tokens):
        family = _family(request_families.HISTOGRAMS, one.ours)
        yield _histogram(endpoint.model, one, family, "router", counts)


def _gauges(endpoint: Endpoint, statuses: Sequence[Status]) -> Iterator[Metric]:
    stats = [status.scheduler for status in statuses]
    num_waiting = sum(s.num_waiting for s in stats)
    num_deferred = sum(s.num_waiting_for_adapter for s in stats)
    for name, text, value in (
        ("num_requests_waiting", "Sequences that wait.", num_waiting),
        ("num_requests_running", "Sequences that run.", sum(s.num_running for s in stats)),
        ("kv_cache_usage_perc", "KV pages in use; 1: all.", kv_usage(statuses)),
    ):
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name", "engine"])
        gauge.add_metric([endpoint.model, ENGINE], float(value))
        yield gauge
    reasons = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason",
        "Sequences that wait; deferred: for an adapter.",
        labels=["model_name", "engine", "reason"],
    )
    reasons.add_metric([endpoint.model, ENGINE, "capacity"], float(num_waiting - num_deferred))
    reasons.add_metric([endpoint.model, ENGINE, "deferred"], float(num_deferred))
    yield reasons
    config = GaugeMetricFamily(
        "vllm:cache_config_info", "The KV cache.", labels=["block_size", "num_gpu_blocks", "engine"]
    )
    num_pages = sum(s.total_pages for s in stats)
    config.add_metric([str(endpoint.page_size), str(num_pages), ENGINE], 1.0)
    yield config


def _adapters(
    endpoint: Endpoint, records: Sequence[AdapterRecord], statuses: Sequence[Status], now: float
) -> Metric:
    running, waiting = _in_use(records, statuses, endpoint.max_labels)
    family = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters with running and with waiting requests; the value is the time.",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    num_slots = sum(status.scheduler.num_slots for status in statuses)
    family.add_metric([str(num_slots), ",".join(running), ",".join(waiting)], now)
    return family


def _in_use(
    records: Sequence[AdapterRecord], statuses: Sequence[Status], max_labels: int
) -> tuple[list[str], list[str]]:
    """Return the names of adapters that run and that are being loaded for a request."""
    running: set[str] = set()
    loading: set[str] = set()
    for status in statuses:
        for slot in status.scheduler.slots:
            digests = {digest for digest, _ in parts_of(slot.adapter)}
            if slot.leases:
                running |= digests
            elif slot.loading:
                loading |= digests

    def names_of(digests: set[str]) -> list[str]:
        names = (
            record.name
            for record in records
            if {record.digest, *(version.digest for version in record.versions)} & digests
        )
        return sorted(names)[:max_labels]

    return names_of(running), names_of(loading - running)


def _scheduler_counters(model: str, statuses: Sequence[Status]) -> Iterator[Metric]:
    for name, text, count_of in SCHEDULER_COUNTERS:
        family = _counter(name, text, "replica")
        for status in statuses:
            count = float(count_of(status.scheduler.counters))
            family.add_metric([model, ENGINE, status.replica], count)
        yield family
    sources = _counter(
        "prompt_tokens_by_source", "Prompt tokens by where they are from.", "source", "replica"
    )
    for status in statuses:
        for source, count_of in SOURCES:
            count = float(count_of(status.scheduler.counters))
            sources.add_metric([model, ENGINE, source, status.replica], count)
    yield sources


def _ended(model: str, routers: Sequence[RouterCounts]) -> Metric:
    family = _counter("request_success", "Answers that ended, by how.", "finished_reason", "router")
    for router in routers:
        for (reason,), count in router.counters.get("finished_requests", ()):
            family.add_metric([model, ENGINE, reason, router.router], count)
    return family


def _rejections(model: str, routers: Sequence[RouterCounts]) -> Metric:
    family = CounterMetricFamily(
        "vllm:admission_rejections",
        "Calls that a limit on those that wait has kept out.",
        labels=["model_name", "reason", "router"],
    )
    for router in routers:
        series = router.counters.get("rejections", ())
        count = sum(count for (reason,), count in series if reason in QUEUE_LIMITS)
        family.add_metric([model, "max_num_queued_reqs", router.router], count)
        family.add_metric([model, "max_num_queued_tokens", router.router], 0.0)
    return family


def _histogram(
    model: str,
    one: Renamed,
    family: Family,
    label: str,
    counts: Sequence[tuple[str, dict[str, HistogramCounts]]],
) -> Metric:
    bounds = one.bounds or family.bounds
    text = "The same in vLLM's buckets." if one.name == one.ours else family.text
    metric = HistogramMetricFamily(f"vllm:{one.name}", text, labels=["model_name", "engine", label])
    for who, histograms in counts:
        if one.ours in histograms:
            counted = regrouped(histograms[one.ours], family.bounds, bounds)
            buckets = list(counted.cumulated(bounds))
            metric.add_metric([model, ENGINE, who], buckets, counted.total)
    return metric


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"vllm:{name}", text, labels=["model_name", "engine", *labels])


def _family(families: Sequence[Family], name: str) -> Family:
    return next(family for family in families if family.name == name)


def _up_to(limit: int, name: str) -> tuple[float, ...]:
    bounds = _family(request_families.HISTOGRAMS, name).bounds
    return tuple(bound for bound in bounds if bound <= limit)
