"""The few series of vLLM that gateways score endpoints by, for those who put one in front.

One endpoint is all replicas together: scorers take one series of each name. As vLLM's own, the
adapters named are those with requests only; what else is on a device, `topwork_adapter_resident`
tells.
"""

from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from cluster.adapters.records import AdapterRecord
from cluster.messages import Status
from cluster.request import parts_of
from cluster.router.metrics.scheduler_metrics import kv_usage


def vllm_families(
    model: str,
    page_size: int,
    records: Sequence[AdapterRecord],
    statuses: Sequence[Status],
    max_labels: int,
    now: float,
) -> Iterator[Metric]:
    """Yield them; `now`, in seconds since 1970, is the value by which scorers find the latest."""
    stats = [status.scheduler for status in statuses]
    for name, text, value in (
        ("num_requests_waiting", "Sequences that wait.", sum(s.num_waiting for s in stats)),
        ("num_requests_running", "Sequences that run.", sum(s.num_running for s in stats)),
        ("kv_cache_usage_perc", "KV pages in use; 1: all.", kv_usage(statuses)),
    ):
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric([model], float(value))
        yield family
    config = GaugeMetricFamily(
        "vllm:cache_config_info", "The KV cache.", labels=["block_size", "num_gpu_blocks"]
    )
    config.add_metric([str(page_size), str(sum(s.total_pages for s in stats))], 1.0)
    yield config
    running, waiting = _in_use(records, statuses, max_labels)
    lora = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters with running and with waiting requests; the value is the time.",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    num_slots = sum(s.num_slots for s in stats)
    lora.add_metric([str(num_slots), ",".join(running), ",".join(waiting)], now)
    yield lora


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
