"""Hosts of a Ray cluster lose their power, the head among them: what goes on, and what comes back.

Hosts are namespaces with an address each; a lost one is cut off first, so that nobody hears that
its processes end.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.asking import wait_for
from tests.end_to_end.hosts.host import why_there_can_be_none
from tests.end_to_end.hosts.ray_hosts import HEAD, RANK, ROUTER, RayHosts, cluster_of_hosts
from tests.end_to_end.server import adapter_dirs
from tests.end_to_end.steady import Steady, mixed_asks, undisturbed

LACKING = why_there_can_be_none()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.ray,
    pytest.mark.skipif(LACKING is not None, reason=f"no hosts: {LACKING}"),
]

WORKERS = ("one", "two", "three")
MODELS = ["smollm2", *list(adapter_dirs())[:3]]
ASKS = mixed_asks(MODELS, 4, seed=5)
ARGUMENTS: dict[str, Any] = {
    "adapter": [f"{name}={path}" for name, path in adapter_dirs().items()],
    "adapter_state": "/shared/adapters",
    "tp": 2,
    "max_num_seqs": 6,
    "threads_per_rank": 1,
    "kv_cache_memory": "128MiB",
    "host_adapter_memory": "64MiB",
    "routers": 1,
}
HEAD_IS_KEPT = {
    "RAY_gcs_storage": "rocksdb",
    "RAY_gcs_storage_path": "/shared/gcs",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
}


def serve(running: RayHosts, **arguments: Any) -> None:
    running.deploy(**arguments)
    wait_for(running.is_ready, running.logs)


def test_a_host_of_ranks_is_lost_and_streams_go_on_at_one_that_has_room(tmp_path: Path) -> None:
    with cluster_of_hosts(tmp_path, dict.fromkeys(WORKERS, 2)) as running:
        serve(running, **ARGUMENTS)
        expected = undisturbed(running, ASKS)
        (router,) = running.hosts_of(ROUTER)
        lost = next(name for name in running.hosts_of(RANK) if name != router)
        with Steady(running, ASKS, expected) as load:
            load.wait_for_more(2)
            running.lose(lost)
            wait_for(lambda: len(running.hosts_of(RANK)) == 2, running.logs)
            load.wait_for_more(len(ASKS))
        assert load.failures == []


def test_without_room_new_calls_get_503_until_the_host_is_back(tmp_path: Path) -> None:
    with cluster_of_hosts(tmp_path, {"one": 2, "two": 2}) as running:
        serve(running, **ARGUMENTS | {"recovery_timeout": 20})
        expected = undisturbed(running, ASKS)
        (router,) = running.hosts_of(ROUTER)
        lost = next(name for name in running.hosts_of(RANK) if name != router)
        running.lose(lost)
        call = {"model": "smollm2", "prompt": "x", "max_tokens": 1}
        with running.client() as client:
            refused = client.post("/v1/completions", json=call)
            assert refused.status_code == 503, refused.text
            assert int(refused.headers["Retry-After"]) > 0
            assert client.get("/health").status_code == 503
        running.join(lost, 2)
        wait_for(running.is_ready, running.logs)
        with Steady(running, ASKS, expected) as load:
            load.wait_for_more(len(ASKS))
        assert load.failures == []


def test_a_head_that_keeps_its_state_is_lost_and_missed_by_no_stream(tmp_path: Path) -> None:
    """Clients ask another host, for the head's own address is gone while it is."""
    with cluster_of_hosts(tmp_path, dict.fromkeys(WORKERS, 2), **HEAD_IS_KEPT) as running:
        serve(running, **ARGUMENTS)
        (router,) = running.hosts_of(ROUTER)
        running.ask(router)
        expected = undisturbed(running, ASKS)
        with Steady(running, ASKS, expected) as load:
            load.wait_for_more(2)
            running.lose(HEAD)
            load.wait_for_more(2 * len(ASKS))
            running.start_head()
            # What only a head can do: ranks are started on another host.
            running.lose(next(name for name in running.hosts_of(RANK) if name != router))
            wait_for(lambda: len(running.hosts_of(RANK)) == 2, running.logs)
            load.wait_for_more(len(ASKS))
        assert load.failures == []


def test_a_head_that_keeps_nothing_ends_the_cluster_which_can_be_made_again(tmp_path: Path) -> None:
    workers = dict.fromkeys(WORKERS[:2], 2)
    with cluster_of_hosts(tmp_path, workers) as running:
        serve(running, **ARGUMENTS)
        (router,) = running.hosts_of(ROUTER)
        running.ask(router)
        expected = undisturbed(running, ASKS)
        with Steady(running, ASKS, expected) as load:
            load.wait_for_more(2)
            running.lose(HEAD)
            load.wait_for_more(len(ASKS))  # what runs goes on, for a while
            load.stop(may_refuse=True)
        assert load.failures == []
        wait_for(lambda: not running.hosts_of(RANK) and not running.hosts_of(ROUTER))
        running.start_head()
        for name, num_cpus in workers.items():
            running.rejoin(name, num_cpus)
        serve(running, **ARGUMENTS)
        with Steady(running, ASKS, expected) as load:
            load.wait_for_more(len(ASKS))
        assert load.failures == []
