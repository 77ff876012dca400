"""`serve deploy` on a running cluster: what changes is taken in, under load, and nothing fails."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.cluster import Cluster, Load
from tests.end_to_end.server import adapter_dirs

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    running = Cluster(num_cpus=8)
    try:
        running.deploy(adapter=[f"pirate={adapter_dirs()['pirate']}"])
        running.wait_for(running.is_ready)
        running.wait_for(running.is_running)
        yield running
    finally:
        running.stop()


def named(cluster: Cluster) -> list[str]:
    return [one["id"] for one in cluster.get("/v1/models").json()["data"]]


def load_adapter(cluster: Cluster, name: str, path: Path) -> None:
    body = {"lora_name": name, "lora_path": str(path)}
    assert cluster.post("/v1/load_lora_adapter", body).is_success


def everyone(cluster: Cluster) -> set[int]:
    """Return the pids of all replicas, ranks and the pool."""
    return (
        cluster.pids("ray::ServeReplica:topwork")
        | cluster.pids("ray::WorkerActor")
        | (cluster.pids("ray::PoolActor"))
    )


def test_adapters_and_log_level_change_without_a_restart_or_a_failed_request(
    cluster: Cluster, tmp_path: Path
) -> None:
    pirate, others = adapter_dirs()["pirate"], sorted(set(adapter_dirs()) - {"pirate"})
    shutil.copytree(adapter_dirs()[others[0]], tmp_path / "many" / "watched")
    load_adapter(cluster, "called", adapter_dirs()[others[1]])
    before = everyone(cluster)
    with Load(cluster.url, ["smollm2", "pirate", "called"], 6) as load:
        second = f"second={adapter_dirs()[others[0]]}"
        cluster.deploy(
            adapter=[f"pirate={pirate}", second],
            adapter_dir=[str(tmp_path / "many")],
            log_level="INFO",
        )
        cluster.wait_for(lambda: {"second", "watched"} <= set(named(cluster)))
        cluster.wait_for(cluster.is_running)
        digest = adapter_digest(cluster, "second")
        cluster.deploy(adapter=[f"pirate={pirate}", f"second={adapter_dirs()[others[1]]}"])
        cluster.wait_for(lambda: "watched" not in named(cluster))
        cluster.wait_for(lambda: adapter_digest(cluster, "second") != digest)
        cluster.deploy(adapter=[f"pirate={pirate}"])
        cluster.wait_for(lambda: "second" not in named(cluster))
        cluster.wait_for(cluster.is_running)
    assert load.failures == []
    assert load.num_answers > 10
    assert set(named(cluster)) == {"smollm2", "pirate", "called"}
    assert everyone(cluster) == before


def adapter_digest(cluster: Cluster, name: str) -> str:
    """Return what a name stands for, once it has been asked for."""
    body = {"model": name, "prompt": "x", "max_tokens": 1}
    assert cluster.post("/v1/completions", body).is_success
    told: Any = cluster.get(f"/v1/adapters/{name}").json()
    return str(told["digest"])


def test_a_scheduler_and_a_router_come_and_go_and_leave_the_others_alone(cluster: Cluster) -> None:
    pirate = f"pirate={adapter_dirs()['pirate']}"
    before = everyone(cluster)
    with Load(cluster.url, ["smollm2", "pirate"], 6) as load:
        cluster.deploy(adapter=[pirate], replicas=2, routers=2)
        cluster.wait_for(lambda: len(cluster.replicas("Scheduler")) == 2)
        cluster.wait_for(cluster.is_running)
        assert before <= everyone(cluster)
        cluster.deploy(adapter=[pirate])
        cluster.wait_for(lambda: len(cluster.replicas("Scheduler")) == 1)
        cluster.wait_for(lambda: len(cluster.replicas("Router")) == 1)
        cluster.wait_for(cluster.is_running)
    assert load.failures == []
    assert load.num_answers > 10


def test_a_new_kv_budget_comes_with_new_ranks_and_refuses_nothing(cluster: Cluster) -> None:
    pirate = f"pirate={adapter_dirs()['pirate']}"
    ranks, others = cluster.pids("ray::WorkerActor"), cluster.pids("ray::PoolActor")
    with Load(cluster.url, ["smollm2", "pirate"], 4) as load:
        cluster.deploy(adapter=[pirate], kv_cache_memory="256MiB", surge=True)
        cluster.wait_for(lambda: not cluster.pids("ray::WorkerActor") & ranks)
        cluster.wait_for(cluster.is_running)
    assert load.failures == []
    assert cluster.pids("ray::PoolActor") == others


def test_a_pool_that_dies_is_back_with_what_calls_have_loaded(cluster: Cluster) -> None:
    before = set(named(cluster))
    assert before > {"smollm2", "pirate"}, "a call has loaded one"
    (pool,) = cluster.pids("ray::PoolActor")
    os.kill(pool, signal.SIGKILL)
    with Load(cluster.url, sorted(before), 3) as load:
        cluster.wait_for(lambda: load.num_answers + len(load.failures) > 9)
    assert load.failures == []
    assert cluster.pids("ray::PoolActor") != {pool}
    assert set(named(cluster)) == before
    assert cluster.is_healthy()


def test_a_new_pool_goes_on_with_what_calls_have_loaded_before_it(cluster: Cluster) -> None:
    before, pools = set(named(cluster)), cluster.pids("ray::PoolActor")
    cluster.deploy(adapter=[f"pirate={adapter_dirs()['pirate']}"], max_lora_rank=32)
    cluster.wait_for(lambda: not cluster.pids("ray::PoolActor") & pools)
    cluster.wait_for(cluster.is_running)
    assert set(named(cluster)) == before
    for name in before:
        assert cluster.post("/v1/completions", {"model": name, "prompt": "x"}).is_success


def test_a_mistake_is_told_by_serve_status_and_what_runs_goes_on(cluster: Cluster) -> None:
    cluster.deploy(adapters=["pirate=/x"])
    cluster.wait_for(lambda: cluster.status()["status"] == "DEPLOY_FAILED")
    assert "adapters" in cluster.status()["message"]
    assert "Traceback" not in cluster.status()["message"]
    assert cluster.is_ready()


def test_serve_shutdown_leaves_nothing_of_the_application(cluster: Cluster) -> None:
    address = f"http://127.0.0.1:{cluster.dashboard}"
    assert cluster.run("serve", "shutdown", "-y", "-a", address).returncode == 0
    cluster.wait_for(lambda: not everyone(cluster))
