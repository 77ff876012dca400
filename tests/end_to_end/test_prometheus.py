"""A minute of load under a real Prometheus: all panels show something, all rules evaluate."""

import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deploy.observability.grafana import FILLS_ON
from tests.end_to_end.asking import wait_for
from tests.end_to_end.processes import title
from tests.end_to_end.prometheus import Prometheus, filled_in, missing, panels
from tests.end_to_end.server import Server, adapter_dirs

pytestmark = [
    pytest.mark.model,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "it is there"),
]
SECONDS = 60.0
NUM_CLIENTS = 6
INFERENCE = 'topwork_http_requests_total{route=~"/v1/(chat/)?completions"}'
BY_ROUTER = f"sum by (router) ({INFERENCE})"


@dataclass
class Watched:
    """A server under load, who watches it, and what its clients have counted."""

    server: Server
    prometheus: Prometheus
    statuses: Counter[int]


def ask(server: Server, number: int) -> int:
    """Ask for something, by a mix of models and forms."""
    models = ["smollm2", *adapter_dirs()]
    body: dict[str, Any] = {
        "model": models[number % len(models)],
        "prompt": f"This is the story of {number % 7} cats who went to sea, and this is how ",
        "max_tokens": 8 + number % 5 * 4,
        "stream": number % 3 == 0,
    }
    if number % 31 == 0:
        body["model"] = "nobody"
    if number % 11 == 0:
        body |= {"model": "smollm2", "lora": [{"name": "pirate"}, {"name": "oracle"}]}
    return server.post("/v1/completions", body).status_code


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Two routers behind the load balancer, and half as many slots as adapters."""
    folder = tmp_path_factory.mktemp("prometheus")
    flags = ("--tp", "1", "--routers", "2", "--max-loras", "2", "--vllm-metrics")
    server = Server(folder / "server.txt", *flags)
    prometheus = Prometheus(folder, server.url.removeprefix("http://"))
    try:
        server.wait_until_ready()
        prometheus.wait_until_it_scrapes()
        yield Watched(server, prometheus, load(server))
    finally:
        prometheus.stop()
        before = server.processes()
        server.stop()
    assert not {pid for pid in before if Path(f"/proc/{pid}").exists()}


def change_adapters(server: Server) -> None:
    """Load an adapter by the API and unload it, so that one is read in the midst of the load."""
    name, folder = next(iter(adapter_dirs().items()))
    body = {"lora_name": f"another-{name}"}
    for call, more in (("load", {"lora_path": str(folder)}), ("unload", {})):
        reply = server.post(f"/v1/{call}_lora_adapter", body | more)
        assert reply.status_code == 200, reply.text


def load(server: Server) -> Counter[int]:
    """Ask for a minute; return how often each status came."""
    statuses: Counter[int] = Counter()
    is_over = threading.Event()

    def client(index: int) -> None:
        number = index
        while not is_over.is_set():
            statuses[ask(server, number)] += 1
            number += NUM_CLIENTS

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        running = [clients.submit(client, index) for index in range(NUM_CLIENTS)]
        try:
            time.sleep(SECONDS / 2)
            change_adapters(server)
            time.sleep(SECONDS / 2)
        finally:
            is_over.set()
        for one in running:
            one.result()
    return statuses


def test_every_panel_shows_something(watched: Watched) -> None:
    empty = [
        f"{panel['title']}: {target['expr']}"
        for panel in panels()
        for target in panel["targets"]
        if not watched.prometheus.query(filled_in(target["expr"]))
        and FILLS_ON not in panel["description"]
    ]
    assert not empty, "\n".join(empty)


def test_every_rule_evaluates(watched: Watched) -> None:
    rules = watched.prometheus.rules()
    assert len([rule for rule in rules if rule["type"] == "alerting"]) > 20
    for rule in rules:
        assert rule["health"] == "ok", rule
        watched.prometheus.query(rule["query"])
        if rule["type"] == "recording":
            assert watched.prometheus.query(rule["name"]), f"{rule['name']} has no value"


def test_nothing_is_said_to_be_broken_that_works(watched: Watched) -> None:
    slow = {"TopworkFirstTokenBudgetFast", "TopworkQueueAge"}  # what else the machine does
    assert watched.prometheus.firing() <= slow | {"TopworkAdapterThrash"}


def test_both_routers_together_count_what_the_clients_count(watched: Watched) -> None:
    told = {str(code): count for code, count in watched.statuses.items()}
    assert told.keys() == {"200", "404"}

    def counted() -> dict[str, float]:
        return {
            labels["code"]: value
            for labels, value in watched.prometheus.query(f"sum by (code) ({INFERENCE})")
        }

    wait_for(lambda: counted() == told)
    assert len(watched.prometheus.query(BY_ROUTER)) == 2


def test_no_counter_ever_falls_whichever_router_answers(watched: Watched) -> None:
    counters = [name for name in watched.prometheus.names() if name.endswith(("_total", "_count"))]
    assert len(counters) > 30
    fallen = {name: watched.prometheus.query(f"resets({name}[10m]) > 0") for name in counters}
    assert not [name for name, found in fallen.items() if found]
    assert watched.prometheus.value("count(topwork_router_up == 1)") == 2


def test_a_killed_router_is_told_of_and_its_counts_stay(watched: Watched) -> None:
    server, prometheus = watched.server, watched.prometheus
    before = {labels["router"]: count for labels, count in prometheus.query(BY_ROUTER)}
    victim = min(
        pid
        for pid in server.processes()
        if title(pid).startswith("ray::ServeReplica:topwork:Router")
    )
    os.kill(victim, signal.SIGKILL)
    dead = "topwork_router_up == 0"
    wait_for(lambda: bool(prometheus.query(dead)))
    ((labels, _),) = prometheus.query(dead)
    wait_for(lambda: len(prometheus.query("topwork_router_up")) == 3)
    after = {labels["router"]: count for labels, count in prometheus.query(BY_ROUTER)}
    assert after[labels["router"]] == before[labels["router"]] > 0
    assert not prometheus.query(f"resets({INFERENCE}[10m]) > 0")


def test_promtool_finds_nothing_but_the_colons_of_vllm(watched: Watched) -> None:
    text = watched.server.get("/metrics").text
    run = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True
    )
    findings = (run.stdout + run.stderr).splitlines()
    assert len(findings) == 5, findings
    assert all(one.startswith("vllm:") and "':'" in one for one in findings), findings


def test_gateways_read_vllms_names(watched: Watched) -> None:
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert len(watched.prometheus.query(f"vllm:{name}")) == 1
    ((labels, value),) = watched.prometheus.query("vllm:lora_requests_info")
    assert labels["max_lora"] == "2" and "running_lora_adapters" not in labels  # ""
    assert value > 1.7e9
    told = watched.prometheus.query("count_over_time(vllm:lora_requests_info[5m]) > 0")
    assert {"pirate", "oracle"} <= {
        name for labels, _ in told for name in labels.get("running_lora_adapters", "").split(",")
    }


def test_a_killed_rank_is_told_of_and_fills_the_panels_of_faults(watched: Watched) -> None:
    server, prometheus = watched.server, watched.prometheus
    bodies = [
        {"model": model, "prompt": "On", "max_tokens": 1500, "ignore_eos": True}
        for model in ("smollm2", "pirate")
    ]

    def ask_long(body: dict[str, Any]) -> int:
        return server.post("/v1/completions", body).status_code

    with ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(ask_long, body) for body in bodies]
        wait_for(lambda: server.metric("topwork_requests_running") == 2)
        os.kill(server.rank_pids()[0], signal.SIGKILL)
        assert [one.result() for one in asked] == [503, 503]
    wait_for(lambda: "TopworkRanksLost" in prometheus.firing())
    faulty = [panel for panel in panels() if FILLS_ON in panel["description"]]
    assert faulty
    for panel in faulty:
        for target in panel["targets"]:
            wait_for(lambda asked=target["expr"]: bool(prometheus.query(filled_in(asked))))
    wait_for(server.is_healthy)
