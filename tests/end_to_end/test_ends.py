"""Clients that leave, a HAProxy that dies, and SIGTERM at a server that computes.

What kills a server by force is in test_ends_by_force.py, for each needs a server of its own.
"""

import json
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.asking import wait_for
from tests.end_to_end.processes import program, title
from tests.end_to_end.server import Server
from tests.end_to_end.test_terminal import ALARMING
from tests.patience import PATIENCE, SOON

pytestmark = [pytest.mark.model, pytest.mark.ray]

NUM_CLIENTS = 200


def long_call(index: int, **extra: object) -> dict[str, object]:
    """Return a call that takes long, for `index` another one."""
    prompt = f"{index}: once upon a time"
    body = {"model": "smollm2", "prompt": prompt, "ignore_eos": True, "temperature": 0}
    return body | {"max_tokens": 1000} | extra


def num_asked(server: Server) -> float:
    names = ("topwork_requests_running", "topwork_requests_waiting")
    return sum(server.metric(name) for name in names)


def is_idle(server: Server) -> bool:
    return num_asked(server) == 0


@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
def test_what_clients_asked_who_have_left_is_not_computed(
    victim: Server, is_streamed: bool
) -> None:
    """They leave when all have come in: 16 run, and the others wait for their first token."""
    have_come = threading.Event()
    left = victim.metric("topwork_client_disconnects_total")

    def leave(index: int) -> None:
        body = json.dumps(long_call(index, stream=is_streamed)).encode()
        told = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head = f"{told}Content-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", victim.port), PATIENCE) as client:
            client.sendall(head.encode())
            time.sleep(0.002)  # as most clients do, that send head and body apart
            client.sendall(body)
            have_come.wait(PATIENCE)

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        asked = [clients.submit(leave, index) for index in range(NUM_CLIENTS)]
        wait_for(lambda: num_asked(victim) == NUM_CLIENTS)
        have_come.set()
        for one in asked:
            one.result()
    began = time.monotonic()
    wait_for(lambda: victim.metric("topwork_client_disconnects_total") - left > NUM_CLIENTS / 2)
    steps = victim.metric("topwork_engine_step")
    body = {"model": "smollm2", "prompt": "next", "max_tokens": 1}
    assert victim.post("/v1/completions", body).status_code == 200
    # The next answer takes a step, or two; with 200 calls before it, it would take a minute.
    assert victim.metric("topwork_engine_step") - steps <= 6
    assert is_idle(victim)
    assert time.monotonic() - began < SOON


def haproxy_of(server: Server, *, other_than: int = 0) -> int:
    """Return the HAProxy that serves; one that was replaced may run until its last call ends."""
    found: list[int] = []

    def is_alone() -> bool:
        found[:] = [pid for pid in server.processes() if program(pid) == "haproxy"]
        return len(found) == 1 and found[0] != other_than

    wait_for(is_alone)
    return found[0]


def seconds_until_served(server: Server) -> float:
    """Return how long a new call goes on being refused."""
    began = time.monotonic()

    def is_served() -> bool:
        try:
            return httpx.get(f"{server.url}/version", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    while not is_served():
        assert time.monotonic() - began < PATIENCE
        time.sleep(0.02)
    return time.monotonic() - began


def test_new_calls_are_served_at_once_when_haproxy_has_died(victim: Server) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        pid = haproxy_of(victim)
        os.kill(pid, number)
        assert seconds_until_served(victim) < SOON
        assert victim.chat("smollm2", "Hello", max_tokens=1)["choices"]
        haproxy_of(victim, other_than=pid)


@pytest.mark.slow  # `make test-servers`
def test_no_stream_notices_that_the_manager_of_haproxy_dies(victim: Server) -> None:
    (manager,) = [p for p in victim.processes() if "HAProxyManager" in title(p)]
    pid = haproxy_of(victim)
    with ThreadPoolExecutor(1) as client:
        stream = client.submit(streamed_tokens, victim, long_call(0, max_tokens=400))
        wait_for(lambda: not is_idle(victim))
        os.kill(manager, signal.SIGKILL)
        assert seconds_until_served(victim) < SOON

        def has_another() -> bool:
            assert seconds_until_served(victim) < SOON
            return any("HAProxyManager" in title(p) and p != manager for p in victim.processes())

        wait_for(has_another)
        assert stream.result() == 400
    # The new manager has taken it over, and keeps it as the old one did.
    os.kill(haproxy_of(victim, other_than=pid), signal.SIGKILL)
    assert seconds_until_served(victim) < SOON


NUM_LAST = 150  # tokens: long enough that all calls run at once


def streamed_tokens(server: Server, body: dict[str, object]) -> int:
    """Return how many tokens a stream has that ends as it should."""
    count, last = 0, ""
    asked = {**body, "stream": True, "return_token_ids": True}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=asked, timeout=PATIENCE
    ) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            last = line or last
            if line.startswith("data: {"):
                count += len(json.loads(line[6:])["choices"][0]["token_ids"])
    assert last == "data: [DONE]"
    return count


def alarms(log: str, processes: set[int]) -> list[str]:
    """Return the lines that tell of errors, but for what Ray tells late of earlier processes.

    Those had ended when there were `processes`, of which some had begun after them.
    """

    def is_earlier(pid: int) -> bool:
        return pid not in processes and pid < max(processes)

    lines = [line for line in log.splitlines() if ALARMING.search(line)]
    ended = [re.search(r"A worker died .* Worker PID: (\d+)", line) for line in lines]
    return [
        line
        for line, of in zip(lines, ended, strict=True)
        if of is None or not is_earlier(int(of[1]))
    ]


def test_at_sigterm_calls_that_run_end_as_they_should_and_then_nothing_is_left(
    last_victim: Server,
) -> None:
    before, said = last_victim.processes(), last_victim.log.read_text()
    assert len(before) > 10, "Ray, Serve, HAProxy and a rank"
    with ThreadPoolExecutor(8) as clients:
        streams = [
            clients.submit(streamed_tokens, last_victim, long_call(index, max_tokens=NUM_LAST))
            for index in range(4)
        ]
        whole: list[Future[httpx.Response]] = [
            clients.submit(
                last_victim.post, "/v1/completions", long_call(index, max_tokens=NUM_LAST)
            )
            for index in range(4, 8)
        ]
        wait_for(lambda: last_victim.metric("topwork_requests_running") == 8)
        last_victim.process.send_signal(signal.SIGTERM)
        wait_for(lambda: last_victim.get("/ready").status_code == 503)
        assert last_victim.is_healthy()
        refused = last_victim.post("/v1/completions", long_call(9))
        assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 1
        assert [one.result() for one in streams] == [NUM_LAST] * 4
        answers = [one.result() for one in whole]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [NUM_LAST] * 4
    assert last_victim.process.wait(PATIENCE) == 0
    socket.create_server(("127.0.0.1", last_victim.port)).close()
    assert not {pid for pid in before if Path(f"/proc/{pid}").exists()}
    assert not alarms(last_victim.log.read_text()[len(said) :], before)
