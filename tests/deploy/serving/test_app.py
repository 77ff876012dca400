"""deploy.serving.app: what a cluster decides of a configuration."""

import pytest

from deploy.config import load_config
from deploy.serving.app import num_routers


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
