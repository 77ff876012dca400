"""Servers that end by force, and starts that are broken off: nothing is left, whoever is killed."""

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from deploy.serving.lifecycle.loss import LOST
from tests.end_to_end.asking import wait_for
from tests.end_to_end.processes import program, runs, title
from tests.end_to_end.server import Server
from tests.end_to_end.test_ends import is_idle, long_call, streamed_tokens
from tests.patience import PATIENCE, SOON

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]


def assert_nothing_is_left(server: Server, before: set[int]) -> None:
    """Check that all processes are gone, and that the port is free, soon."""
    deadline = time.monotonic() + SOON
    while left := {pid: title(pid) for pid in before if runs(pid)}:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    socket.create_server(("127.0.0.1", server.port)).close()


def test_nothing_is_left_when_the_command_is_killed(tmp_path: Path) -> None:
    server = Server(tmp_path / "log.txt")
    server.wait_until_ready()
    before = server.processes()
    server.process.kill()
    server.process.wait(PATIENCE)
    assert_nothing_is_left(server, before)
    again = Server(tmp_path / "again.txt", port=server.port)  # as a supervisor starts it again
    again.wait_until_ready()
    again.stop()


@pytest.mark.parametrize("victim", ["gcs_server", "raylet"])
def test_a_server_that_has_lost_its_cluster_says_so_and_ends_when_streams_have(
    tmp_path: Path, victim: str
) -> None:
    server = Server(tmp_path / "log.txt", "--drain-timeout", "45")
    server.wait_until_ready()
    before = server.processes()
    (pid,) = [pid for pid in before if program(pid) == victim]
    with ThreadPoolExecutor(1) as client:
        stream = client.submit(streamed_tokens, server, long_call(0, max_tokens=150))
        wait_for(lambda: not is_idle(server))
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        while (reply := httpx.get(f"{server.url}/health", timeout=5)).status_code == 200:
            assert time.monotonic() - began < SOON
        assert reply.status_code == 503 and reply.headers["Retry-After"]
        assert stream.result() == 150
    assert server.process.wait(PATIENCE) == LOST
    assert f"(pid {pid}) has died" in server.log.read_text()
    assert_nothing_is_left(server, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("after", [0.1, 0.5, 1, 2, 4, 6, 8])
def test_a_start_can_be_broken_off_at_any_moment(
    tmp_path: Path, after: float, number: signal.Signals
) -> None:
    server = Server(tmp_path / "log.txt")
    time.sleep(after)
    before = server.processes()
    server.process.send_signal(number)
    began = time.monotonic()
    code = server.process.wait(PATIENCE)
    assert time.monotonic() - began < SOON
    assert code == (-signal.SIGKILL if number is signal.SIGKILL else 0)
    assert_nothing_is_left(server, before)
