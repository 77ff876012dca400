"""A mistake in values is refused before anything is made, with the key and what to do."""

from typing import Any

import helm_python
import pytest

from tests.helm.charts import KEYS, Object, render

MISTAKES: list[tuple[Object, list[str]]] = [
    ({"scheduler": {"resource": {}}}, ["/scheduler", "resource"]),
    ({"topwork": {"max_lora": 8}}, ["/topwork", "max_lora"]),
    ({"topwork": {"tp": "two"}}, ["/topwork/tp", "integer"]),
    ({"topwork": {"kv_cache_memory": "lots"}}, ["/topwork/kv_cache_memory"]),
    ({"topwork": {"device": "auto"}}, ["/topwork/device", "cuda"]),
    ({"topwork": {"host": "0.0.0.0"}}, ["/topwork", "host"]),
    ({"mode": "statefulset"}, ["/mode", "rayservice"]),
    ({"service": {"port": 80}}, ["/service/port", "1,024"]),
    ({"service": {"port": 8080}}, ["service.port", "8080", "Ray"]),
    ({"image": {"digests": {"cpu": "latest"}}}, ["/image/digests/cpu"]),
    ({"apiKeys": {"secretName": ""}}, ["apiKeys.secretName", "topwork.anonymous"]),
    ({"model": {"source": "hub"}}, ["model.hubId"]),
    ({"model": {"hubId": "org/name"}}, ["model.hubId", "source is pvc"]),
    ({"model": {"source": "hostPath"}}, ["model.hostPath"]),
    ({"model": {"source": "objectStore"}}, ["model.objectStore.source", "REMOTE:BUCKET/PATH"]),
    ({"kernelCache": {"source": "pvc"}}, ["kernelCache.source", "topwork.device is cpu"]),
    (
        {"kernelCache": {"source": "hostPath"}, "topwork": {"device": "cuda"}},
        ["kernelCache.hostPath"],
    ),
    ({"adapters": {"source": "image"}}, ["adapters.image.reference"]),
    ({"adapters": {"watch": True}}, ["adapters.watch", "none"]),
    ({"adapters": {"served": {"pirate": "p"}}}, ["adapters.served", "pirate", "whole path"]),
    ({"scheduler": {"ranksPerHost": 3}, "topwork": {"tp": 4}}, ["scheduler.ranksPerHost", "4"]),
    ({"ray": {"faultTolerance": {"backend": "redis"}}}, ["ray.faultTolerance.redis.address"]),
    (
        {"ray": {"upgrade": {"type": "NewClusterWithIncrementalUpgrade"}}},
        ["ray.upgrade.gatewayClassName"],
    ),
    (
        {
            "ray": {
                "upgrade": {"type": "NewClusterWithIncrementalUpgrade", "gatewayClassName": "g"}
            },
            "ingress": {"enabled": True},
        },
        ["ray.upgrade.type", "ingress.enabled"],
    ),
    (
        {"topwork": {"adapter_state": "/state/adapters"}},
        ["topwork.adapter_state", "ray.upgrade.type", "take None"],
    ),
    ({"autoscaling": {"hpa": {"enabled": True}}}, ["autoscaling", "deployment"]),
    ({"mode": "deployment", "scheduler": {"ranksPerHost": 2}}, ["scheduler.ranksPerHost", "0"]),
    (
        {"mode": "deployment", "autoscaling": {"keda": {"enabled": True}}},
        ["autoscaling.keda.serverAddress"],
    ),
    (
        {
            "mode": "deployment",
            "autoscaling": {"keda": {"enabled": True}, "hpa": {"enabled": True}},
        },
        ["autoscaling.keda.enabled"],
    ),
    (
        {"mode": "deployment", "autoscaling": {"minReplicas": 3, "maxReplicas": 2}},
        ["autoscaling.maxReplicas"],
    ),
    ({"apiKeys": KEYS["apiKeys"], "topwork": {"anonymous": True}}, ["topwork.anonymous"]),
    ({"tokenRules": {"configMapName": "rules"}}, ["tokenRules", "topwork.oidc_issuer"]),
    ({"monitoring": {"serviceMonitor": {"enabled": True}}}, ["monitoring.apiKey", "metrics"]),
    ({"topwork": {"max_replicas": 2}}, ["topwork.max_replicas", "ray.autoscaler.enabled"]),
    ({"topwork": {"replicas": 3, "max_replicas": 2}}, ["topwork.max_replicas", "3"]),
    ({"mode": "deployment", "topwork": {"replicas": 2}}, ["autoscaling.minReplicas"]),
    ({"topwork": {"drain_timeout": 299.5}}, ["terminationGracePeriodSeconds", "335"]),
    ({"terminationGracePeriodSeconds": 65}, ["terminationGracePeriodSeconds", "65"]),
    (
        {"mode": "deployment", "terminationGracePeriodSeconds": 35},
        ["terminationGracePeriodSeconds", "40"],
    ),
    ({"fullnameOverride": "9lives"}, ["fullnameOverride", "9lives"]),
    ({"nameOverride": "Topwork"}, ["nameOverride", "Topwork"]),
    ({"httpRoute": {"enabled": True}}, ["httpRoute.parentRefs"]),
]


@pytest.mark.parametrize(("values", "words"), MISTAKES, ids=[str(m[1]) for m in MISTAKES])
def test_a_mistake_is_told_with_its_key(values: Object, words: list[str]) -> None:
    with pytest.raises(helm_python.HelmError) as caught:
        render(merged(KEYS | {"topwork": {"device": "cpu"}}, values))
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert len(message) < 400, message


def test_the_same_values_without_the_mistake_are_taken() -> None:
    assert render(KEYS | {"topwork": {"device": "cpu"}})


def merged(one: Any, other: Any) -> Any:
    """Return values with others on top."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return other
    return {
        key: merged(one[key], other[key]) if key in one and key in other else {**one, **other}[key]
        for key in {**one, **other}
    }
