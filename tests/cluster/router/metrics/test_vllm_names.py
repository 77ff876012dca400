"""vLLM's names over several replicas: one series of each, as scorers take them."""

from collections.abc import Sequence

from msgspec import structs
from prometheus_client.samples import Sample

from cluster.adapters.records import AdapterRecord, VersionRecord
from cluster.engine.status import EngineStatus
from cluster.histogram import REQUEST_TOKENS_BUCKETS, WAIT_BUCKETS, Histogram
from cluster.messages import Status
from cluster.metrics_hub import RouterCounts
from cluster.router.metrics.request_metrics import RouterMetrics
from cluster.router.metrics.vllm_names import LATENCY, Endpoint, vllm_families
from cluster.scheduler.stats import SchedulerCounters, SlotStats

RECORD = AdapterRecord("", None, 1, "/", 8, 1, (), False, "disk")


def status(replica: str, *slots: SlotStats, **fields: int) -> Status:
    idle = EngineStatus(replica, lambda: 0.0).snapshot(1, None, None, {})
    return structs.replace(idle, scheduler=structs.replace(idle.scheduler, slots=slots, **fields))


def samples_of(
    records: Sequence[AdapterRecord] = (),
    statuses: Sequence[Status] = (),
    routers: Sequence[RouterCounts] = (),
    max_labels: int = 10,
) -> list[Sample]:
    endpoint = Endpoint("m", 16, 300, max_labels)
    families = vllm_families(endpoint, records, statuses, routers, 5.0)
    return [sample for family in families for sample in family.samples]


def values(samples: list[Sample], name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Return the values of a name by some of its labels."""
    return {
        tuple(sample.labels[label] for label in labels): sample.value
        for sample in samples
        if sample.name == f"vllm:{name}"
    }


def series(
    records: list[AdapterRecord], statuses: list[Status], max_labels: int = 10
) -> dict[str, tuple[dict[str, str], float]]:
    """Return labels and value of each name, of which there is one series."""
    samples = samples_of(records, statuses, max_labels=max_labels)
    return {sample.name: (dict(sample.labels), sample.value) for sample in samples}


def test_replicas_are_one_endpoint() -> None:
    one = status("0", num_waiting=2, num_running=3, held_pages=10, total_pages=10, num_slots=4)
    two = status("1", num_waiting=1, num_running=1, held_pages=0, total_pages=30, num_slots=4)
    samples = series([], [one, two])
    assert samples["vllm:num_requests_waiting"] == ({"model_name": "m", "engine": "0"}, 3)
    assert samples["vllm:num_requests_running"] == ({"model_name": "m", "engine": "0"}, 4)
    assert samples["vllm:kv_cache_usage_perc"] == ({"model_name": "m", "engine": "0"}, 0.25)
    assert samples["vllm:cache_config_info"][0] == {
        "block_size": "16",
        "num_gpu_blocks": "40",
        "engine": "0",
    }
    assert samples["vllm:lora_requests_info"][0]["max_lora"] == "8"


def test_adapters_that_run_and_that_are_loaded_for_a_request_are_named() -> None:
    old = VersionRecord(1, "d-old", "/", 0, 1, "host")
    records = [
        structs.replace(RECORD, name=name, digest=digest)
        for name, digest in (("runs", "d1"), ("loads", "d2"), ("warm", "d3"), ("never", None))
    ]
    records.append(structs.replace(RECORD, name="replaced", digest="d-new", versions=(old,)))
    slots = (
        SlotStats(0, "d1", False, 2),
        SlotStats(1, "d2", True, 0),
        SlotStats(2, "d3", False, 0),
        SlotStats(3, "d-old", False, 1),
    )
    labels, value = series(records, [status("0", *slots)])["vllm:lora_requests_info"]
    assert labels["running_lora_adapters"] == "replaced,runs"
    assert labels["waiting_lora_adapters"] == "loads"
    assert value == 5.0


def test_what_runs_in_a_sum_runs_and_no_more_are_named_than_may_be() -> None:
    records = [structs.replace(RECORD, name=name, digest=name) for name in "cab"]
    slots = (SlotStats(0, "a:1.0,b:0.5", False, 1), SlotStats(1, "c", False, 1))
    samples = series(records, [status("0", *slots)], max_labels=2)
    assert samples["vllm:lora_requests_info"][0]["running_lora_adapters"] == "a,b"


def test_an_endpoint_without_replicas_is_empty() -> None:
    samples = series([], [])
    assert samples["vllm:kv_cache_usage_perc"][1] == 0.0
    assert samples["vllm:lora_requests_info"][0]["max_lora"] == "0"


def test_what_waits_for_an_adapter_is_deferred() -> None:
    one = status("0", num_waiting=5, num_waiting_for_adapter=2)
    two = status("1", num_waiting=1, num_waiting_for_adapter=1)
    samples = samples_of(statuses=[one, two])
    assert values(samples, "num_requests_waiting_by_reason", "reason") == {
        ("capacity",): 3,
        ("deferred",): 3,
    }


def test_counters_of_replicas_are_apart_as_one_may_end() -> None:
    counters = SchedulerCounters(
        prompt_tokens=10, cached_prompt_tokens=4, generated_tokens=7, preemptions=2
    )
    one = status("0")
    one = structs.replace(one, scheduler=structs.replace(one.scheduler, counters=counters))
    samples = samples_of(statuses=[one, status("1")])
    for name, value in (
        ("prompt_tokens_total", 10),
        ("prompt_tokens_cached_total", 4),
        ("generation_tokens_total", 7),
        ("prefix_cache_queries_total", 10),
        ("prefix_cache_hits_total", 4),
        ("num_preemptions_total", 2),
    ):
        assert values(samples, name, "replica") == {("0",): value, ("1",): 0}, name
    of_sources = values(samples, "prompt_tokens_by_source_total", "source", "replica")
    assert {source: count for (source, replica), count in of_sources.items() if replica == "0"} == {
        "local_compute": 6,
        "local_cache_hit": 4,
        "external_kv_transfer": 0,
    }


def test_waits_are_in_vllms_buckets() -> None:
    waits = Histogram(WAIT_BUCKETS)
    for seconds in (0.002, 0.3, 0.31, 7.6, 8000):
        waits.observe(seconds)
    one = structs.replace(status("0"), histograms={"queue_time_seconds": waits.counts()})
    samples = samples_of(statuses=[one])
    buckets = values(samples, "request_queue_time_seconds_bucket", "le")
    assert [float(le) for (le,) in buckets] == [*LATENCY, float("inf")]
    assert buckets["0.3",] == 2
    assert buckets["0.5",] == 3
    assert buckets["5.0",] == 3
    assert buckets["10.0",] == 4
    assert buckets["7680.0",] == 4
    assert buckets["+Inf",] == 5
    assert values(samples, "request_queue_time_seconds_count") == {(): 5}


def test_tokens_of_requests_are_counted_up_to_the_context() -> None:
    prompts = Histogram(REQUEST_TOKENS_BUCKETS)
    for length in (1, 60, 299):
        prompts.observe(length)
    counts = structs.replace(
        RouterMetrics("m", 10).counts("r"), histograms={"request_prompt_tokens": prompts.counts()}
    )
    samples = samples_of(routers=[counts])
    buckets = values(samples, "request_prompt_tokens_bucket", "le")
    edges = (1, 2, 5, 10, 20, 50, 100, 200, float("inf"))
    assert [float(le) for (le,) in buckets] == list(edges)
    assert buckets["+Inf",] == 3
    assert buckets["200.0",] == 2


def test_every_way_to_end_is_there_before_anything_ends_so() -> None:
    metrics = RouterMetrics("m", 10)
    metrics.finished("stop", 2)
    samples = samples_of(routers=[metrics.counts("r")])
    assert values(samples, "request_success_total", "finished_reason", "router") == {
        ("stop", "r"): 2,
        ("length", "r"): 0,
        ("abort", "r"): 0,
        ("error", "r"): 0,
        ("repetition", "r"): 0,
    }


def test_calls_that_a_limit_keeps_out_are_rejected_and_those_of_a_drain_are_not() -> None:
    metrics = RouterMetrics("m", 10)
    for reason in ("scheduler_queue", "router_in_flight", "router_in_flight", "draining"):
        metrics.rejected(reason)
    samples = samples_of(routers=[metrics.counts("r")])
    assert values(samples, "admission_rejections_total", "reason") == {
        ("max_num_queued_reqs",): 3,
        ("max_num_queued_tokens",): 0,
    }
