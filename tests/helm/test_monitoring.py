"""What Prometheus, its operator and Grafana are given."""

import re
import shutil
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from helm.tools import generate
from tests.deploy.observability.test_rules import served_names
from tests.helm.charts import CHART, Object, of_kind, render, rendered, the, values_of


def relabeled(monitor: Object, labels: dict[str, str]) -> dict[str, str]:
    """Return the labels of a target after the monitor's relabelings, as Prometheus makes them."""
    for rule in monitor["spec"]["endpoints"][0]["relabelings"]:
        if rule.get("action") == "labeldrop":
            labels = {k: v for k, v in labels.items() if not re.fullmatch(rule["regex"], k)}
            continue
        source = ";".join(labels[one] for one in rule.get("sourceLabels", []))
        labels = labels | {rule["targetLabel"]: rule["replacement"].replace("$1", source)}
    return {k: v for k, v in labels.items() if k == "__address__" or not k.startswith("__")}


def target(pod: str, address: str) -> dict[str, str]:
    return {
        "__address__": address,
        "__meta_kubernetes_pod_name": pod,
        "job": "demo-llm",
        "namespace": "prod",
        "service": "demo-llm",
        "endpoint": "serve",
        "pod": pod,
        "container": "ray",
        "node": f"node-of-{pod}",
    }


def test_a_cluster_is_one_target_however_many_pods_answer() -> None:
    monitor = the(rendered("everything"), "ServiceMonitor")
    one = relabeled(monitor, target("a", "10.0.0.1:8001"))
    assert one == relabeled(monitor, target("b", "10.0.0.2:8001"))
    assert one["__address__"] == "demo-llm.prod.svc:8001"
    assert one["job"] == "prod/demo-llm"


def test_one_node_servers_are_a_job_each() -> None:
    monitor = the(rendered("deployment-keda"), "ServiceMonitor")
    one = relabeled(monitor, target("a", "10.0.0.1:8000"))
    assert one["__address__"] == "10.0.0.1:8000" and one["job"] == "prod/a"


def test_prometheus_presents_the_key_that_the_values_name() -> None:
    for name, key in (("everything", "token"), ("deployment-keda", "key")):
        (endpoint,) = the(rendered(name), "ServiceMonitor")["spec"]["endpoints"]
        assert endpoint["authorization"] == {"credentials": {"name": "scrape-key", "key": key}}
    monitoring = {"monitoring": {"serviceMonitor": {"enabled": True}}}
    objects = render({"topwork": {"anonymous": True, "device": "cpu", "tp": 1}} | monitoring)
    (endpoint,) = the(objects, "ServiceMonitor")["spec"]["endpoints"]
    assert "authorization" not in endpoint


def test_keda_asks_for_a_metric_that_is_served() -> None:
    scaled = the(rendered("deployment-keda"), "ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    assert 'namespace="prod"' in query and 'service="demo-topwork"' in query
    (metric,) = re.findall(r"topwork_\w+", query)
    assert metric in served_names()


def test_every_rule_and_dashboard_of_the_chart_is_given_out() -> None:
    objects = rendered("everything")
    rules = the(objects, "PrometheusRule")["spec"]["groups"]
    files = sorted((CHART / "files" / "rules").glob("*.yaml"))
    assert rules == [one for file in files for one in yaml.safe_load(file.read_text())["groups"]]
    maps = [one for one in of_kind(objects, "ConfigMap") if "dashboard" in one["metadata"]["name"]]
    given = {name: text for one in maps for name, text in one["data"].items()}
    dashboards = (CHART / "files" / "dashboards").glob("*.json")
    assert given == {file.name: file.read_text() for file in dashboards}
    assert all(one["metadata"]["labels"]["grafana_dashboard"] == "1" for one in maps)


def test_rules_and_dashboards_with_braces_of_their_own_arrive_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, copy = tmp_path / "observability", tmp_path / "helm"
    rule: dict[str, Any] = {"alert": "A", "expr": "up == 0", "labels": {"x": "{{ $labels.job }}"}}
    for folder in ("rules", "dashboards"):
        (sources / folder).mkdir(parents=True)
    for name in ("a", "b"):
        text = yaml.safe_dump({"groups": [{"name": name, "rules": [rule]}]})
        (sources / "rules" / f"{name}.yaml").write_text(text)
    (sources / "dashboards" / "one.json").write_text('{"legend": "{{adapter}}"}\n')
    shutil.copytree(CHART, copy)
    monkeypatch.setattr(generate, "CHART", copy)
    monkeypatch.setattr(generate, "OBSERVABILITY", sources)
    assert generate.main([]) == 0
    with helm_python.Chart.load(copy) as chart:
        text = chart.render(values_of("everything"))["topwork/templates/monitors.yaml"]
    objects = [one for one in yaml.safe_load_all(text) if one]
    groups = the(objects, "PrometheusRule")["spec"]["groups"]
    assert [one["name"] for one in groups] == ["a", "b"]
    assert groups[0]["rules"] == [rule]
    (board,) = [one for one in of_kind(objects, "ConfigMap") if "one.json" in one["data"]]
    assert board["data"]["one.json"] == '{"legend": "{{adapter}}"}\n'
