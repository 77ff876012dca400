"""What an operator changes while streams run: no call fails, no stream is cut, no token differs."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.chaos.traffic import Answer
from tests.end_to_end.cluster import Cluster
from tests.end_to_end.server import adapter_dirs
from tests.end_to_end.steady import Steady, mixed_asks, undisturbed
from tests.patience import PATIENCE

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]

MODELS = ["smollm2", *list(adapter_dirs())[:3]]
ASKS = mixed_asks(MODELS, 6, seed=7)
FIRST: dict[str, Any] = {
    "adapter": [f"{name}={path}" for name, path in adapter_dirs().items()],
    "max_num_seqs": 6,  # choices: some wait
    "threads_per_rank": 1,
    "drain_timeout": 60,
    "routers": 1,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    running = Cluster(num_cpus=10)
    try:
        running.deploy(**FIRST)
        running.wait_for(running.is_ready)
        running.wait_for(running.is_running)
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[Answer]:
    return undisturbed(cluster, ASKS)


def replaced(cluster: Cluster, deployment: str, before: set[int], count: int = 1) -> None:
    """Wait until a deployment has so many replicas, none of them one of those before."""

    def is_so() -> bool:
        now = set(cluster.replicas(deployment).values())
        return len(now) == count and not now & before

    cluster.wait_for(is_so)
    cluster.wait_for(cluster.is_running)


def pids(cluster: Cluster, deployment: str) -> set[int]:
    return set(cluster.replicas(deployment).values())


def continued(cluster: Cluster) -> float:
    """Return how many streams have gone on elsewhere because a scheduler left."""
    lines = cluster.get("/metrics").text.splitlines()
    name = "topwork_stream_continuations_total{"
    found = [line for line in lines if line.startswith(name) and 'reason="leaving"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def num_ready_schedulers(cluster: Cluster) -> int:
    lines = cluster.get("/metrics").text.splitlines()
    return sum(line.startswith("topwork_engine_ready{") and line[-3:] == "1.0" for line in lines)


def test_a_scheduler_that_is_replaced_hands_its_streams_over(
    cluster: Cluster, expected: list[Answer]
) -> None:
    before, moved = pids(cluster, "Scheduler"), continued(cluster)
    with Steady(cluster, ASKS, expected) as load:
        cluster.deploy(**FIRST, kv_cache_memory="256MiB", surge=True)
        replaced(cluster, "Scheduler", before)
        load.wait_for_more(3)
    assert load.failures == []
    assert continued(cluster) > moved


def test_one_of_two_schedulers_goes_and_its_streams_go_on_at_the_other(
    cluster: Cluster, expected: list[Answer]
) -> None:
    cluster.deploy(**FIRST, replicas=2)
    cluster.wait_for(lambda: num_ready_schedulers(cluster) == 2)
    cluster.wait_for(cluster.is_running)
    moved = continued(cluster)
    with Steady(cluster, ASKS, expected) as load:
        load.wait_for_more(3)
        cluster.deploy(**FIRST)
        cluster.wait_for(lambda: len(pids(cluster, "Scheduler")) == 1)
        load.wait_for_more(3)
    assert load.failures == []
    assert continued(cluster) > moved


def test_autoscaling_is_turned_on_and_schedulers_come_with_load_and_go_without_it(
    cluster: Cluster, expected: list[Answer]
) -> None:
    with Steady(cluster, ASKS[5:7], expected[5:7]) as light:
        with Steady(cluster, ASKS, expected) as heavy:
            cluster.deploy(**FIRST, max_replicas=2, scale_up_delay=1, scale_down_delay=3)
            cluster.wait_for(lambda: num_ready_schedulers(cluster) == 2)
            heavy.wait_for_more(3)
        cluster.wait_for(lambda: len(pids(cluster, "Scheduler")) == 1)
        light.wait_for_more(1)
    assert heavy.failures == []
    assert light.failures == []


def test_new_calls_wait_for_a_lone_scheduler_that_is_replaced(
    cluster: Cluster, expected: list[Answer]
) -> None:
    before = pids(cluster, "Scheduler")
    with Steady(cluster, ASKS, expected) as load:
        cluster.deploy(**FIRST, kv_cache_memory="384MiB")
        replaced(cluster, "Scheduler", before)
        load.wait_for_more(3)
    assert load.failures == []


def test_a_router_that_is_replaced_ends_its_streams(
    cluster: Cluster, expected: list[Answer]
) -> None:
    before = pids(cluster, "Router")
    with Steady(cluster, ASKS, expected) as load:
        cluster.deploy(**FIRST, stream_keep=61)
        replaced(cluster, "Router", before)
        load.wait_for_more(3)
    assert load.failures == []


def test_routers_come_and_go_and_their_streams_end_before_them(
    cluster: Cluster, expected: list[Answer]
) -> None:
    with Steady(cluster, ASKS, expected) as load:
        cluster.deploy(**FIRST | {"routers": 3})
        cluster.wait_for(lambda: len(pids(cluster, "Router")) == 3)
        cluster.wait_for(cluster.is_running)
        load.wait_for_more(6)  # at all of them
        cluster.deploy(**FIRST)
        cluster.wait_for(lambda: len(pids(cluster, "Router")) == 1)
        load.wait_for_more(3)
    assert load.failures == []


def test_a_pool_that_is_replaced_is_missed_by_nobody(
    cluster: Cluster, expected: list[Answer]
) -> None:
    before = cluster.pids("ray::PoolActor")
    with Steady(cluster, ASKS, expected) as load:
        cluster.deploy(**FIRST, max_lora_rank=32)
        cluster.wait_for(lambda: len(cluster.pids("ray::PoolActor") - before) == 1)
        cluster.wait_for(cluster.is_running)
        load.wait_for_more(6)
    assert load.failures == []


def test_a_drain_cuts_no_stream_and_can_be_undone(cluster: Cluster, expected: list[Answer]) -> None:
    with Steady(cluster, ASKS, expected) as load:
        load.wait_for_more(3)
        load.stop(may_refuse=True)
        assert cluster.post("/v1/drain").status_code == 200
    assert load.failures == []
    told = cluster.post("/v1/completions", {"model": "smollm2", "prompt": "x", "max_tokens": 1})
    assert told.status_code == 503
    assert httpx.delete(f"{cluster.url}/v1/drain", timeout=PATIENCE).status_code == 200
    cluster.wait_for(cluster.is_ready)  # each router hears of it by itself
    with Steady(cluster, ASKS, expected) as load:
        load.wait_for_more(3)
    assert load.failures == []
