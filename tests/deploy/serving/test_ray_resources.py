"""What of Ray's CPUs the processes of an application take together."""

import pytest

from deploy.config import ServeConfig
from deploy.serving.pool import pool_deployment
from deploy.serving.router import router_deployment
from deploy.serving.scheduler import scheduler_deployment


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_the_adapter_pool_finds_room_on_any_node_that_the_others_fill(tp: int) -> None:
    config = ServeConfig.model_validate({"model": "tiny", "device": "cpu", "tp": tp})
    bundles = scheduler_deployment(config)._replica_config.placement_group_bundles
    assert bundles is not None and len(bundles) == 1 + tp
    takes = [bundle["CPU"] for bundle in bundles]
    takes.append((router_deployment(config).ray_actor_options or {})["num_cpus"])
    pool = (pool_deployment(config).ray_actor_options or {})["num_cpus"]
    assert pool > 0, "a head without CPUs could be given the pool"
    for cores in range(1, len(takes) + 1):
        assert round(sum(takes[:cores]) + pool, 4) <= cores
