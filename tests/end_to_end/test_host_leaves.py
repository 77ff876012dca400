"""A host is emptied before it goes, as a pod is: streams go on elsewhere and no call fails."""

from pathlib import Path

import pytest
import yaml

from deploy.demo.many_adapters import make_many
from tests.end_to_end.asking import wait_for
from tests.end_to_end.hosts.ray_hosts import POOL, ROUTER, SCHEDULER, RayHosts, cluster_of_hosts
from tests.end_to_end.steady import Steady, undisturbed
from tests.end_to_end.test_hosts_lost import ARGUMENTS, ASKS, LACKING, serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.ray,
    pytest.mark.skipif(LACKING is not None, reason=f"no hosts: {LACKING}"),
]


KEY = "a-key-that-may-load"


def serve_for_an_admin(running: RayHosts) -> None:
    keys = [{"key": KEY, "tenant": "test", "adapters": "*", "admin": True}]
    (running.network.shared / "keys.yaml").write_text(yaml.safe_dump(keys))
    running.headers = {"Authorization": f"Bearer {KEY}"}
    own = {"anonymous": False, "api_key_file": "/shared/keys.yaml", "adapter_root": ["/shared"]}
    serve(running, **ARGUMENTS | own | {"tp": 1})


def load_late(running: RayHosts) -> str:
    """Load an adapter that no configuration names; return its digest."""
    (path,) = make_many(running.network.shared, 1)
    call = {"lora_name": "late", "lora_path": f"/shared/{path.name}"}
    with running.client() as client:
        reply = client.post(
            "/v1/load_lora_adapter", json=call, headers={"Accept": "application/json"}
        )
        assert reply.status_code == 200, reply.text
    digest: str = reply.json()["digest"]
    return digest


def digest_of_late(running: RayHosts) -> str | None:
    with running.client() as client:
        reply = client.get("/v1/adapters")
        assert reply.status_code == 200, reply.text
    return {entry["name"]: entry["digest"] for entry in reply.json()["data"]}.get("late")


@pytest.mark.parametrize(
    "what", [SCHEDULER, ROUTER, POOL], ids=["scheduler", "router", "adapter_pool"]
)
def test_a_host_is_emptied_and_nothing_fails(tmp_path: Path, what: str) -> None:
    with cluster_of_hosts(tmp_path, {"one": 3, "two": 3}) as running:
        serve_for_an_admin(running)
        digest = load_late(running)
        expected = undisturbed(running, ASKS)
        (goes,) = running.hosts_of(what)
        with Steady(running, ASKS, expected) as load:
            load.wait_for_more(2)
            running.empty(goes)
            assert running.hosts_of("ray::ServeReplica").count(goes) == 0
            running.lose(goes)
            load.wait_for_more(len(ASKS))
        assert load.failures == []
        wait_for(running.is_ready)
        assert digest_of_late(running) == digest
