"""The chart renders for every set of values, and each object is what its API takes."""

import helm_python
import pytest

from tests.helm.charts import (
    CHART,
    VALUES,
    Object,
    of_kind,
    pod_templates,
    rendered,
    values_of,
)
from tests.helm.schemas import KUBERAY, KUBERNETES, faults

# What came with a version is not in the one before.
NEWEST_ONLY = {
    "image-volume": "volumes of images: Kubernetes 1.31",
    "rocksdb": "a head that keeps its own state: KubeRay 1.7",
    "everything": "a token's secret by its name: KubeRay 1.6",
}


@pytest.mark.parametrize("name", VALUES)
def test_helm_finds_nothing_to_complain_of(name: str) -> None:
    report = helm_python.lint(CHART, values_of(name), strict=True, kube_version="v1.33.0")
    complaints = [one for one in report["messages"] if one["severity"] > 1]
    assert not complaints and not report["errors"]


@pytest.mark.parametrize("name", VALUES)
def test_every_object_is_what_the_newest_apis_take(name: str) -> None:
    check(rendered(name), KUBERNETES[-1], KUBERAY[-1])


@pytest.mark.parametrize("name", [one for one in VALUES if one not in NEWEST_ONLY])
def test_every_object_is_what_the_oldest_apis_take(name: str) -> None:
    check(rendered(name), KUBERNETES[0], KUBERAY[0])


def check(objects: list[Object], kubernetes: str, kuberay: str) -> None:
    wrapped = []
    if of_kind(objects, "RayService"):  # KubeRay's schema is laxer about pods than Kubernetes'
        for component, template in pod_templates(objects).items():
            metadata = {**template["metadata"], "name": component}
            wrapped.append({**template, "apiVersion": "v1", "kind": "Pod", "metadata": metadata})
    for one in objects + wrapped:
        found = faults(one, kubernetes, kuberay)
        assert not found, f"{one['kind']} {one['metadata']['name']}: {found}"


def test_a_schema_refuses_what_it_does_not_know() -> None:
    for kind, path in (
        ("RayService", ("spec", "rayClusterConfig", "headGroupSpec")),
        ("RayService", ("spec", "serveService", "spec")),
        ("ServiceMonitor", ("spec",)),
        ("PodDisruptionBudget", ("spec",)),
    ):
        (one, *_) = of_kind(rendered("everything"), kind)
        assert not faults(one, KUBERNETES[-1], KUBERAY[-1])
        found = faults(with_typo(one, path), KUBERNETES[-1], KUBERAY[-1])
        assert any("typo" in fault for fault in found), (kind, found)


def with_typo(one: Object, path: tuple[str, ...]) -> Object:
    if not path:
        return {**one, "typo": 1}
    return {**one, path[0]: with_typo(one[path[0]], path[1:])}
