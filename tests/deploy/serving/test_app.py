"""deploy.serving.app: what a cluster decides of a configuration."""

import pytest
import ray
from ray.serve.exceptions import RayServeException

from deploy.config import load_config
from deploy.serving.app import build, num_routers
from deploy.serving.haproxy.front_door import NAME, FrontDoor


@pytest.mark.parametrize(
    ("num_cpus", "device", "keys", "expected"),
    [
        (0, "cpu", {}, 1),
        (5, "cpu", {}, 1),
        (6, "cpu", {}, 2),
        (6, "cpu", {"tp": 2}, 1),
        (5, "cuda", {"tp": 8}, 2),
        (12, "cpu", {"tp": 2, "max_replicas": 3}, 1),
        (13, "cpu", {"tp": 2, "max_replicas": 3}, 2),
    ],
)
def test_a_cluster_has_two_routers_where_nothing_else_needs_their_cores(
    num_cpus: float, device: str, keys: dict[str, int], expected: int
) -> None:
    config = load_config(None, {"model": "some/model", **keys})
    assert num_routers(config, device, num_cpus) == expected


def test_what_is_asked_of_haproxy_must_be_what_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `serve deploy` would answer yes, and HAProxy go on in plain HTTP."""
    model = {"model": "some/model", "revision": "0" * 40}  # a commit: the hub is not asked
    asked = {**model, "tls_cert": "/c.pem", "tls_key": "/k.pem"}
    with pytest.raises(RayServeException, match="topwork environment --tls-cert"):
        build(asked)
    monkeypatch.setenv(NAME, FrontDoor(tls_cert="/c.pem", tls_key="/k.pem").environment()[NAME])
    build(asked)
    build(model)
    assert not ray.is_initialized(), "to build an application starts no cluster"
    with pytest.raises(RayServeException, match="--max-connections-per-address`; now it is None"):
        build({**model, "max_connections_per_address": 5})
    with pytest.raises(RayServeException, match="--body-timeout`; now it is 30"):
        build({**model, "body_timeout": 60.0})
