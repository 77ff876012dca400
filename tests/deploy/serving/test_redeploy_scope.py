"""deploy.serving.redeploy_scope and the application: what a changed key restarts."""

from typing import Any

import pytest
from ray.serve._private.build_app import build_app
from ray.serve.exceptions import RayServeException

from deploy.config import ServeConfig
from deploy.serving.app import application, build
from deploy.serving.redeploy_scope import NOBODY, POOL, ROUTER, SCHEDULER

BASE = {"model": "some/model", "served_model_name": "m", "device": "cpu"}


def versions(**changes: Any) -> dict[str, str]:
    """Return the version of each deployment as Serve's controller would get it."""
    built = build_app(application(ServeConfig(**(BASE | changes))), name="topwork")
    configs = {one.name: one._deployment_config for one in built.deployments}
    for config in configs.values():
        config.version = "of the whole application"  # what Serve does to each
    return {name: config.version for name, config in configs.items()}


def restarted(**changes: Any) -> set[str]:
    before, after = versions(), versions(**changes)
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize(
    ("change", "touched"),
    [
        ({"adapter": ("a=/x",)}, ""),
        ({"adapter_dir": ("/x",)}, ""),
        ({"log_level": "DEBUG"}, ""),
        ({"replicas": 3, "routers": 2, "max_replicas": 4}, ""),
        ({"api_key_file": "/keys"}, "Router"),
        ({"kv_cache_memory": 2**20}, "Scheduler"),
        ({"adapter_root": ("/x",)}, "AdapterCatalog"),
        ({"max_loras": 2}, "AdapterCatalog Scheduler"),
        ({"tp": 2}, "AdapterCatalog Router Scheduler"),
        ({"model": "another/model"}, "AdapterCatalog Router Scheduler"),
    ],
)
def test_a_change_restarts_whom_it_concerns(change: dict[str, Any], touched: str) -> None:
    assert restarted(**change) == set(touched.split())


def test_every_key_concerns_somebody_or_explicitly_nobody() -> None:
    assert set(ServeConfig.model_fields) == NOBODY | POOL | ROUTER | SCHEDULER
    assert not NOBODY & (POOL | ROUTER | SCHEDULER)


def test_the_version_survives_the_way_to_the_controller() -> None:
    built = build_app(application(ServeConfig(**BASE)), name="topwork")
    sent = {one.name: one._deployment_config.to_proto().version for one in built.deployments}
    assert sent == versions()


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"modle": "x"}, "modle"),
        ({"model": "x", "tp": 0}, "tp"),
        ({"model": "x", "host": "0.0.0.0"}, "api_key_file"),
        ({"model": "x", "host": "0.0.0.0", "anonymous": True, "api_key_file": "k"}, "exclude"),
        ({"model": "x", "replicas": 3, "max_replicas": 2}, "max_replicas"),
    ],
)
def test_a_mistake_in_the_arguments_is_told_as_one_sentence(
    args: dict[str, Any], named: str
) -> None:
    with pytest.raises(RayServeException, match=named):
        build(args)
