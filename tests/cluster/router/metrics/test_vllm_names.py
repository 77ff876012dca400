"""vLLM's names over several replicas: one series of each, as scorers take them."""

from msgspec import structs

from cluster.adapters.records import AdapterRecord, VersionRecord
from cluster.engine.status import EngineStatus
from cluster.messages import Status
from cluster.router.metrics.vllm_names import vllm_families
from cluster.scheduler.stats import SlotStats

RECORD = AdapterRecord("", None, 1, "/", 8, 1, (), False, "disk")


def status(replica: str, *slots: SlotStats, **fields: int) -> Status:
    idle = EngineStatus(replica, lambda: 0.0).snapshot(1, None, None, {})
    return structs.replace(idle, scheduler=structs.replace(idle.scheduler, slots=slots, **fields))


def series(
    records: list[AdapterRecord], statuses: list[Status], max_labels: int = 10
) -> dict[str, tuple[dict[str, str], float]]:
    families = vllm_families("m", 16, records, statuses, max_labels, 5.0)
    return {
        sample.name: (dict(sample.labels), sample.value)
        for family in families
        for sample in family.samples
    }


def test_replicas_are_one_endpoint() -> None:
    one = status("0", num_waiting=2, num_running=3, held_pages=10, total_pages=10, num_slots=4)
    two = status("1", num_waiting=1, num_running=1, held_pages=0, total_pages=30, num_slots=4)
    samples = series([], [one, two])
    assert samples["vllm:num_requests_waiting"] == ({"model_name": "m"}, 3)
    assert samples["vllm:num_requests_running"] == ({"model_name": "m"}, 4)
    assert samples["vllm:kv_cache_usage_perc"] == ({"model_name": "m"}, 0.25)
    assert samples["vllm:cache_config_info"][0] == {"block_size": "16", "num_gpu_blocks": "40"}
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
