"""Helm installs, upgrades, rolls back and uninstalls the chart, against an API server of memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from tests.helm.charts import CHART, values_of
from tests.helm.fake_api import FakeApi, fake_api

Cluster = tuple[FakeApi, helm_python.Config]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cluster]:
    monkeypatch.setenv("HOME", str(tmp_path))  # Helm keeps what it discovered there
    with fake_api() as (api, address):
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": address}}],
            "users": [{"name": "fake", "user": {}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
            "current-context": "fake",
        }
        with helm_python.Config(
            kubeconfig_content=json.dumps(kubeconfig), namespace="prod", storage_driver="memory"
        ) as config:
            yield api, config


def adapters(api: FakeApi) -> list[str]:
    (service,) = api.of_kind("RayService")
    args: dict[str, Any] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0][
        "args"
    ]
    return list(args.get("adapter", []))


def test_a_release_is_installed_changed_rolled_back_and_removed(cluster: Cluster) -> None:
    api, config = cluster
    values = values_of("gpu-one-host")
    config.install(CHART, "demo", values)
    assert adapters(api) == ["oracle=/models/adapters/oracle", "pirate=/models/adapters/pirate"]
    assert not api.of_kind("Pod")  # the test is run by `helm test` only
    installed = api.of_kind("RayService")

    del values["adapters"]["served"]["oracle"]
    config.upgrade(CHART, "demo", values)
    assert adapters(api) == ["pirate=/models/adapters/pirate"]

    config.rollback("demo")
    assert api.of_kind("RayService") == installed
    assert [one["revision"] for one in config.history("demo")] == [1, 2, 3]

    config.uninstall("demo")
    assert api.objects == {}


def test_a_claim_that_is_to_be_kept_outlives_its_release(cluster: Cluster) -> None:
    api, config = cluster
    config.install(CHART, "demo", values_of("minimal-cpu"))
    config.uninstall("demo")
    assert [one["metadata"]["name"] for one in api.objects.values()] == ["demo-topwork-model"]


def test_adapters_that_others_list_in_a_config_map_are_served(cluster: Cluster) -> None:
    api, config = cluster
    listed = {"oracle": "/models/others/oracle", "pirate": "/models/others/pirate"}
    catalogue = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "catalogue"}}
    api.objects["/api/v1/namespaces/prod/configmaps/catalogue"] = {**catalogue, "data": listed}
    values = values_of("minimal-cpu") | {
        "adapters": {"configMap": "catalogue", "served": {"pirate": "/models/pirate"}}
    }
    config.install(CHART, "demo", values)
    assert adapters(api) == ["oracle=/models/others/oracle", "pirate=/models/pirate"]

    del listed["oracle"]
    config.upgrade(CHART, "demo", values)
    assert adapters(api) == ["pirate=/models/pirate"]


def test_a_release_without_its_config_map_of_adapters_is_refused(cluster: Cluster) -> None:
    api, config = cluster
    values = values_of("minimal-cpu") | {"adapters": {"configMap": "catalogue"}}
    with pytest.raises(helm_python.HelmError, match="adapters.configMap"):
        config.install(CHART, "demo", values)
    assert api.objects == {}


def test_one_node_servers_go_through_the_same_cycle(cluster: Cluster) -> None:
    api, config = cluster
    values = values_of("deployment")
    config.install(CHART, "demo", values)
    (first,) = [one for one in api.of_kind("ConfigMap") if "topwork.yaml" in one["data"]]
    values["adapters"]["served"]["letter"] = "letter"
    config.upgrade(CHART, "demo", values)
    (second,) = [one for one in api.of_kind("ConfigMap") if "topwork.yaml" in one["data"]]
    assert first["metadata"]["name"] != second["metadata"]["name"]
    config.uninstall("demo")
    assert [one["kind"] for one in api.objects.values()] == ["PersistentVolumeClaim"]
