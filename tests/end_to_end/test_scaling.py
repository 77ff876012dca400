"""Schedulers come with load and go without it, and no request notices."""

from collections.abc import Iterator

import pytest

from tests.end_to_end.cluster import Cluster, Load
from tests.end_to_end.server import adapter_dirs

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    running = Cluster(num_cpus=8)
    try:
        running.deploy(
            adapter=[f"{name}={path}" for name, path in adapter_dirs().items()],
            max_num_seqs=4,
            max_replicas=2,
            scale_up_delay=1,
            scale_down_delay=3,
            threads_per_rank=1,
        )
        running.wait_for(running.is_ready)
        yield running
    finally:
        running.stop()


def num_schedulers(cluster: Cluster) -> int:
    return len(cluster.replicas("Scheduler"))


def test_one_scheduler_becomes_two_under_load_and_one_again_and_nothing_fails(
    cluster: Cluster,
) -> None:
    assert num_schedulers(cluster) == 1
    with Load(cluster.url, ["smollm2", *adapter_dirs()], 2) as light:
        with Load(cluster.url, ["smollm2", *adapter_dirs()], 10) as heavy:
            cluster.wait_for(lambda: num_schedulers(cluster) == 2)
            cluster.wait_for(lambda: len(ready_schedulers(cluster)) == 2)
            before = generated(cluster)
            cluster.wait_for(lambda: both_went_on(before, generated(cluster)))
        # The light load goes on while one of the two has to go.
        cluster.wait_for(lambda: num_schedulers(cluster) == 1)
        answered = light.num_answers
        cluster.wait_for(lambda: light.num_answers > answered + 2)
    assert heavy.failures == []
    assert light.failures == []
    assert cluster.is_healthy()


def samples(cluster: Cluster, name: str) -> dict[str, float]:
    """Return the values of a metric by its labels."""
    lines = cluster.get("/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith(f"{name}{{"))
    return {labels: float(value) for labels, value in pairs}


def ready_schedulers(cluster: Cluster) -> list[str]:
    return [one for one, up in samples(cluster, "topwork_engine_ready").items() if up]


def both_went_on(before: dict[str, float], now: dict[str, float]) -> bool:
    return all(now.get(one, 0) > tokens for one, tokens in before.items())


def generated(cluster: Cluster) -> dict[str, float]:
    return samples(cluster, "topwork_engine_generation_tokens_total")


def test_drain_stops_every_router_and_tells_what_is_left(cluster: Cluster) -> None:
    told = cluster.post("/v1/drain").json()
    assert told["status"] == "draining"
    assert [one["running"] for one in told["schedulers"]] == [0]
    body = {"model": "smollm2", "prompt": "x", "max_tokens": 1}
    assert cluster.post("/v1/completions", body).status_code == 503
