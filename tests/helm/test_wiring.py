"""The objects of a release fit together: ports, selectors, probes, network, names."""

import re
from typing import Any

import pytest

from cluster.api.routes.admin.operations import operation_routes
from tests.helm.charts import (
    KEYS,
    VALUES,
    Object,
    of_kind,
    pod_templates,
    render,
    rendered,
    the,
    values_of,
)
from tests.helm.ray_facts import ray_facts

EVERY_SET = pytest.mark.parametrize("name", VALUES)
OF_SERVERS = {"head", "router", "scheduler", "server"}


@EVERY_SET
def test_every_probe_asks_a_port_that_is_there_and_a_route_that_is_served(name: str) -> None:
    # Asked for its paths only.
    routes: Any = operation_routes(None, None)  # type: ignore[arg-type]
    paths = {route.path for route in routes.routes}
    paths |= set(ray_facts()["paths"])
    for component, template in pod_templates(rendered(name)).items():
        if component == "test":
            continue
        (server,) = template["spec"]["containers"]
        ports = {port["name"] for port in server["ports"]}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = server[kind]
            if "httpGet" in probe:
                assert probe["httpGet"]["port"] in ports
                assert probe["httpGet"]["path"] in paths
            else:
                command = probe["exec"]["command"]
                serve = next(one for one in server["ports"] if one["name"] == "serve")
                assert command[-1] == str(serve["containerPort"])
                assert command[-2] in {"proxy", "ranks", "server"}


@EVERY_SET
def test_no_two_ports_of_a_pod_have_the_same_number(name: str) -> None:
    for template in pod_templates(rendered(name)).values():
        (server,) = template["spec"]["containers"]
        numbers = [port["containerPort"] for port in server.get("ports", [])]
        assert len(set(numbers)) == len(numbers)


def test_probes_of_what_serves_reflect_serving_and_the_age_of_steps() -> None:
    pods = {
        c: t["spec"]["containers"][0] for c, t in pod_templates(rendered("gpu-one-host")).items()
    }
    assert pods["router"]["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "serve"}
    assert pods["scheduler"]["readinessProbe"]["httpGet"] == {"path": "/health", "port": "serve"}
    assert pods["scheduler"]["livenessProbe"]["exec"]["command"][-2] == "ranks"
    assert pods["router"]["livenessProbe"]["exec"]["command"][-2] == "proxy"


@EVERY_SET
def test_services_and_monitors_name_ports_that_pods_have(name: str) -> None:
    objects = rendered(name)
    ports = named_ports(objects)
    services = of_kind(objects, "Service")
    for ray in of_kind(objects, "RayService"):
        services += [ray["spec"]["serveService"]] if "serveService" in ray["spec"] else []
    for service in services:
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == {port["port"]}
    service_ports = {port["name"] for one in services for port in one["spec"]["ports"]}
    for monitor in of_kind(objects, "ServiceMonitor"):
        assert {one["port"] for one in monitor["spec"]["endpoints"]} <= service_ports
        (service,) = services
        assert monitor["spec"]["selector"]["matchLabels"].items() <= (
            service["metadata"]["labels"].items()
        )
    for monitor in of_kind(objects, "PodMonitor"):
        assert {one["port"] for one in monitor["spec"]["podMetricsEndpoints"]} <= set(ports)
    for policy in of_kind(objects, "NetworkPolicy"):
        rules = [*policy["spec"]["ingress"], *policy["spec"]["egress"]]
        named = {port["port"] for rule in rules for port in rule.get("ports", [])}
        assert {one for one in named if isinstance(one, str)} <= set(ports)


@EVERY_SET
def test_selectors_take_the_pods_they_are_for_and_no_others(name: str) -> None:
    objects = rendered(name)
    pods = {c: t["metadata"]["labels"] for c, t in pod_templates(objects).items()}
    for service in of_kind(objects, "Service"):
        assert selected(pods, {"matchLabels": service["spec"]["selector"]}) == {"server"}
    for budget in of_kind(objects, "PodDisruptionBudget"):
        component = budget["metadata"]["name"].rpartition("-")[2]
        assert selected(pods, budget["spec"]["selector"]) == {component}
    for policy in of_kind(objects, "NetworkPolicy"):
        assert selected(pods, policy["spec"]["podSelector"]) == OF_SERVERS & set(pods)
    for deployment in of_kind(objects, "Deployment"):
        assert selected(pods, deployment["spec"]["selector"]) == {"server"}
    for component, template in pod_templates(objects).items():
        for spread in template["spec"].get("topologySpreadConstraints", []):
            assert selected(pods, spread["labelSelector"]) == {component}


def test_all_but_one_scheduler_and_router_stay_when_nodes_are_drained() -> None:
    values = values_of("gpu-many-hosts")
    values["topwork"] |= {"replicas": 3, "routers": 2}
    budgets = of_kind(render(values), "PodDisruptionBudget")
    stay = {one["metadata"]["name"]: one["spec"]["minAvailable"] for one in budgets}
    # Two schedulers of two pods each.
    assert stay == {"demo-topwork-router": 1, "demo-topwork-scheduler": 4}


def test_a_claim_is_attached_for_reading_only_so_that_several_nodes_may() -> None:
    for template in pod_templates(rendered("minimal-cpu")).values():
        claims = [
            one for one in template["spec"].get("volumes", []) if "persistentVolumeClaim" in one
        ]
        assert all(one["persistentVolumeClaim"]["readOnly"] for one in claims)


def test_ingress_and_route_reach_the_service() -> None:
    for name in ("everything", "deployment"):
        objects = rendered(name)
        service = (of_kind(objects, "Service") or [serve_service(objects)])[0]
        (port,) = service["spec"]["ports"]
        for ingress in of_kind(objects, "Ingress"):
            (rule,) = ingress["spec"]["rules"]
            backend = rule["http"]["paths"][0]["backend"]["service"]
            assert backend == {"name": service["metadata"]["name"], "port": {"name": port["name"]}}
        for route in of_kind(objects, "HTTPRoute"):
            (reference,) = route["spec"]["rules"][0]["backendRefs"]
            assert reference == {"name": service["metadata"]["name"], "port": port["port"]}


def test_a_change_of_the_chart_alone_makes_no_new_cluster() -> None:
    # KubeRay starts a second cluster when a pod template changes.
    for template in pod_templates(rendered("gpu-one-host")).values():
        if template["metadata"]["labels"]["app.kubernetes.io/component"] != "test":
            assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(
                template["metadata"]["labels"]
            )


def test_two_releases_in_one_namespace_share_no_name_and_no_pod() -> None:
    one, two = render(values_of("everything"), "one"), render(values_of("everything"), "two")
    assert not {ident(x) for x in one} & {ident(x) for x in two}
    pods = {c: t["metadata"]["labels"] for c, t in pod_templates(two).items()}
    for budget in of_kind(one, "PodDisruptionBudget"):
        assert not selected(pods, budget["spec"]["selector"])
    assert not selected(pods, the(one, "NetworkPolicy")["spec"]["podSelector"])


@pytest.mark.parametrize("release", ["a", "x" * 53, "9-begins-with-a-digit", "topwork", "a.b"])
def test_names_fit_whatever_the_release_is_called(release: str) -> None:
    values = values_of("everything") | {"serviceAccount": ""}
    if not re.fullmatch("[a-z][-a-z0-9]*", release):
        values["fullnameOverride"] = "llm"
    for one in render(values, release):
        name = one["metadata"]["name"]
        assert len(name) <= 63 and re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", name)
        if one["kind"] == "RayService":
            assert len(name) <= 47  # more are refused by KubeRay
        for value in one["metadata"]["labels"].values():
            assert len(value) <= 63


def test_two_long_names_that_begin_alike_stay_two() -> None:
    one, two = render(KEYS, "x" * 50 + "one"), render(KEYS, "x" * 50 + "two")
    assert not {ident(x) for x in one} & {ident(x) for x in two}


def selected(pods: dict[str, dict[str, str]], selector: Object) -> set[str]:
    """Return the components whose labels a selector takes."""
    found = set()
    for component, labels in pods.items():
        is_in = all(
            labels.get(one["key"]) in one["values"]
            for one in selector.get("matchExpressions", [])
            if one["operator"] == "In"
        )
        if is_in and selector.get("matchLabels", {}).items() <= labels.items():
            found.add(component)
    return found


def named_ports(objects: list[Object]) -> dict[str, set[int]]:
    """Return the numbers that containers give to each name of a port."""
    found: dict[str, set[int]] = {}
    for template in pod_templates(objects).values():
        for container in template["spec"]["containers"]:
            for port in container.get("ports", []):
                found.setdefault(port["name"], set()).add(port["containerPort"])
    return found


def serve_service(objects: list[Object]) -> Object:
    service: Object = the(objects, "RayService")["spec"]["serveService"]
    return service


def ident(one: Object) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]
