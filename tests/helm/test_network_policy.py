"""What the network policy lets through, as a cluster's network decides it for each connection."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.helm.charts import VALUES, Object, of_kind, pod_templates, rendered, the

EVERY_SET = pytest.mark.parametrize("name", VALUES)


@dataclass(frozen=True, slots=True)
class Peer:
    """A pod: its labels, its namespace and the numbers of its named ports."""

    labels: dict[str, str]
    namespace: str
    ports: dict[str, int]


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of a policy in a namespace; what no rule lets through is dropped."""

    spec: Object
    namespace: str

    def lets_in(self, source: Peer, target: Peer, port: str | int) -> bool:
        return self._allows(self.spec["ingress"], "from", source, target, port)

    def lets_out(self, source: Peer, target: Peer, port: str | int, protocol: str = "TCP") -> bool:
        assert self.selects(source)
        return self._allows(self.spec["egress"], "to", target, target, port, protocol)

    def selects(self, pod: Peer) -> bool:
        assert set(self.spec["policyTypes"]) == {"Ingress", "Egress"}
        return pod.namespace == self.namespace and _matches(self.spec["podSelector"], pod.labels)

    def _allows(
        self,
        rules: list[Object],
        side: str,
        peer: Peer,
        target: Peer,
        port: str | int,
        protocol: str = "TCP",
    ) -> bool:
        number = target.ports[port] if isinstance(port, str) else port
        return any(
            (side not in rule or any(self._is(one, peer) for one in rule[side]))
            and ("ports" not in rule or (protocol, number) in _numbers(rule["ports"], target))
            for rule in rules
        )

    def _is(self, selector: Object, peer: Peer) -> bool:
        assert set(selector) <= {"podSelector", "namespaceSelector", "ipBlock"}, selector
        if "ipBlock" in selector:
            return False  # of addresses outside the cluster
        if "namespaceSelector" in selector:
            names = {"kubernetes.io/metadata.name": peer.namespace}
            if not _matches(selector["namespaceSelector"], names):
                return False
        elif peer.namespace != self.namespace:
            return False
        return _matches(selector.get("podSelector", {}), peer.labels)


def _numbers(ports: list[Object], target: Peer) -> set[tuple[str, int]]:
    return {
        (one["protocol"], target.ports.get(one["port"], -1))
        if isinstance(one["port"], str)
        else (one["protocol"], one["port"])
        for one in ports
    }


def _matches(selector: Object, labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels", "matchExpressions"}, selector
    for one in selector.get("matchExpressions", []):
        assert one["operator"] == "In", one
        if labels.get(one["key"]) not in one["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def pods_of(objects: list[Object]) -> dict[str, Peer]:
    """Return the pods of a release, by component."""
    found = {}
    for component, template in pod_templates(objects).items():
        ports = template["spec"]["containers"][0].get("ports", [])
        numbers = {port["name"]: port["containerPort"] for port in ports}
        found[component] = Peer(template["metadata"]["labels"], "prod", numbers)
    return found


def servers_of(objects: list[Object]) -> dict[str, Peer]:
    """Return all pods of a release but that of its test."""
    return {name: pod for name, pod in pods_of(objects).items() if name != "test"}


def policy_of(name: str) -> tuple[Policy, dict[str, Peer]]:
    objects = rendered(name)
    return Policy(the(objects, "NetworkPolicy")["spec"], "prod"), servers_of(objects)


def outside(name: str, namespace: str = "elsewhere") -> Peer:
    return Peer({"app.kubernetes.io/name": name}, namespace, {})


STRANGER = outside("stranger")
NAMES = Peer({"k8s-app": "kube-dns"}, "kube-system", {})
OPERATOR = outside("kuberay-operator")
PROMETHEUS = outside("prometheus")


@EVERY_SET
def test_the_pods_of_a_release_reach_each_other_on_every_port_and_no_others_do(name: str) -> None:
    policy, servers = policy_of(name)
    neighbour = Peer({"app.kubernetes.io/name": "another"}, "prod", {})
    for target in servers.values():
        for port in (*target.ports, 34567):  # Ray, ranks and HAProxy take ports as they are free
            for source in servers.values():
                assert policy.lets_in(source, target, port)
                assert policy.lets_out(source, target, port)
            for source in (STRANGER, neighbour):
                if port != "serve":
                    assert not policy.lets_in(source, target, port), port


@EVERY_SET
def test_names_are_looked_up_and_the_hub_is_reached_unless_it_must_not_be(name: str) -> None:
    policy, servers = policy_of(name)
    for source in servers.values():
        assert policy.lets_out(source, NAMES, 53, "UDP")
        assert policy.lets_out(source, NAMES, 53, "TCP")
        for port in (443, 6443):  # the hub and object stores; Kubernetes itself
            assert policy.lets_out(source, STRANGER, port) == (name != "air-gapped")
        assert not policy.lets_out(source, STRANGER, 80)


@EVERY_SET
def test_all_that_monitors_scrape_is_open_to_prometheus_alone(name: str) -> None:
    policy, servers = policy_of(name)
    for port in scraped(rendered(name)):
        targets = [pod for pod in servers.values() if port in pod.ports]
        assert targets
        for target in targets:
            assert policy.lets_in(PROMETHEUS, target, port), port
            if port != "serve":
                assert not policy.lets_in(STRANGER, target, port), port


def scraped(objects: list[Object]) -> Iterator[str]:
    """Yield the names of the ports that any monitor scrapes."""
    for monitor in of_kind(objects, "PodMonitor"):
        yield from (one["port"] for one in monitor["spec"]["podMetricsEndpoints"])
    for monitor in of_kind(objects, "ServiceMonitor"):
        yield from (one["port"] for one in monitor["spec"]["endpoints"])


@EVERY_SET
def test_kuberays_operator_reaches_what_it_asks_of_a_cluster(name: str) -> None:
    policy, servers = policy_of(name)
    if "head" not in servers:
        return
    for port in ("dashboard", "serve"):  # Serve's applications; whether each pod serves
        assert policy.lets_in(OPERATOR, servers["head"], port)
    assert not policy.lets_in(OPERATOR, servers["head"], "gcs-server")
    assert not policy.lets_in(STRANGER, servers["head"], "dashboard")


@EVERY_SET
def test_a_redis_that_holds_the_clusters_state_is_reached(name: str) -> None:
    objects = rendered(name)
    policy, servers = policy_of(name)
    options: Any = {}
    for service in of_kind(objects, "RayService"):
        options = service["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions", {})
    if "redisAddress" in options:
        port = int(options["redisAddress"].rpartition(":")[2])
        assert policy.lets_out(servers["head"], outside("redis", "data"), port)
    else:
        assert not policy.lets_out(next(iter(servers.values())), outside("redis", "data"), 6379)


@EVERY_SET
def test_everyone_may_ask_unless_clients_are_named_and_then_they_and_the_test(name: str) -> None:
    policy, servers = policy_of(name)
    has_clients = name == "openshift"
    for target in servers.values():
        assert policy.lets_in(STRANGER, target, "serve") != has_clients
        assert policy.lets_in(outside("client", "apps"), target, "serve")
        assert policy.lets_in(pods_of(rendered(name))["test"], target, "serve")
