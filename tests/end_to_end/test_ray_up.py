"""`ray up` for real: hosts are namespaces with sshd, and ranks of one group sum over their network.

Commands are those of docs/operations.md; requests go through the head, which computes nothing. The
tests build on each other in the order of the file: the cluster grows, loses a host and is taken
down.
"""

import re
from collections.abc import Iterator

import pytest

from tests.end_to_end.asking import wait_for
from tests.end_to_end.hosts.host import Host, why_there_can_be_none
from tests.end_to_end.hosts.network import Network
from tests.end_to_end.hosts.operator import Operator
from tests.end_to_end.server import ADAPTERS_DIR, MODEL_DIR

LACKING = why_there_can_be_none()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.ray,
    pytest.mark.skipif(LACKING is not None, reason=f"no hosts: {LACKING}"),
]

PROMPT = "The capital of France is"
RANK = "ray::WorkerActor"


class Cluster:
    """A head and workers as `ray up` has made them, with the application on them."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.head = network.start("head")
        workers = ("one", "two")
        for name in workers:
            network.start(name)
        self.operator = Operator(network)
        self.operator.write_cluster_file("head", workers)
        self.operator.ray_up()
        self.wait_for_nodes(3)
        self.operator.deploy(
            model=str(MODEL_DIR),
            served_model_name="smollm2",
            tp=2,
            adapter=[f"pirate={ADAPTERS_DIR / 'pirate'}"],
            adapter_dir=[],
            max_replicas=None,  # the second would have no room
            threads_per_rank=1,
            host_adapter_memory="64MiB",
            kv_cache_memory="128MiB",
        )
        self.wait_until_served()

    def wait_for_nodes(self, count: int) -> None:
        """Wait until so many nodes, the head with them, are in the cluster."""
        wait_for(lambda: self.num_nodes() == count, self.num_nodes)

    def num_nodes(self) -> int:
        """Return how many nodes `ray status` tells of, active and idle, whatever their type."""
        said = self.operator.on_the_head("ray status")
        alive = said.partition("Active:")[2].partition("Pending:")[0]
        return sum(int(count) for count in re.findall(r"^\s*(\d+) \S+\s*$", alive, re.MULTILINE))

    def wait_until_served(self) -> None:
        wait_for(lambda: self.operator.get("/ready")[0] == 200, lambda: self.operator.get("/ready"))

    def answers(self) -> list[str]:
        """Return what the base model and the adapter say to one prompt."""
        said = [self.operator.complete(model, PROMPT) for model in ("smollm2", "pirate")]
        assert [status for status, _ in said] == [200, 200], said
        return [text for _, text in said]

    def is_answered(self) -> bool:
        """Return whether a request gets an answer: while ranks start anew it is 503."""
        return self.operator.complete("pirate", PROMPT)[0] == 200

    def hosts_of_ranks(self) -> list[str]:
        """Return the names of the hosts that ranks run on, one for each rank."""
        return [
            name
            for name, host in self.network.hosts.items()
            if host.is_there
            for line in host.processes()
            if line.startswith(RANK)
        ]


def connections_of_ranks(host: Host) -> set[frozenset[str]]:
    """Return both ends of each TCP connection that a rank of a host has."""
    lines = host.run("ss", "-tnpH", "state", "established").splitlines()
    return {frozenset(line.split()[2:4]) for line in lines if RANK[:12] in line}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    names = ("head", "one", "two", "three", "operator")
    with Network(tmp_path_factory.mktemp("hosts"), names) as network:
        yield Cluster(network)


@pytest.fixture(scope="module")
def first_answers(cluster: Cluster) -> list[str]:
    """What is said before anything happens to the cluster."""
    return cluster.answers()


def test_a_group_of_two_ranks_on_two_hosts_answers_through_the_head(
    cluster: Cluster, first_answers: list[str]
) -> None:
    assert "Paris" in first_answers[0]
    assert first_answers[0] != first_answers[1], "the adapter has its own voice"
    assert sorted(cluster.hosts_of_ranks()) == ["one", "two"]
    one, two = (connections_of_ranks(cluster.network.hosts[name]) for name in ("one", "two"))
    assert one & two, "the ranks sum over a connection of their own"
    assert cluster.answers() == first_answers


def test_who_has_no_key_is_answered_401_and_who_has_no_token_joins_no_cluster(
    cluster: Cluster,
) -> None:
    address = cluster.head.address
    plain = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}"]
    one = cluster.network.hosts["one"]
    assert one.run(*plain, f"http://{address}:8000/v1/models") == "401"
    dashboard = "http://127.0.0.1:8265/api/serve/applications/"
    assert cluster.head.run(*plain, dashboard) == "401"


def test_a_host_is_added_and_one_is_lost_and_requests_are_answered_again(
    cluster: Cluster, first_answers: list[str]
) -> None:
    cluster.network.start("three")
    cluster.operator.join("three")
    cluster.wait_for_nodes(4)
    assert cluster.answers() == first_answers, "nobody was disturbed"

    cluster.network.hosts["two"].lose()
    wait_for(lambda: sorted(cluster.hosts_of_ranks()) == ["one", "three"], cluster.hosts_of_ranks)
    wait_for(cluster.is_answered)
    assert cluster.answers() == first_answers


def test_ray_down_leaves_no_process_on_any_host(cluster: Cluster) -> None:
    cluster.operator.ray_down()
    there: list[Host] = [host for host in cluster.network.hosts.values() if host.is_there]
    assert len(there) == 4
    wait_for(
        lambda: not any(host.processes() for host in there),
        lambda: {host.name: host.processes() for host in there},
    )
