"""HAProxy as our settings let Serve run it: clients that leave or stay, and what dies."""

import json
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from deploy.serving.haproxy import admin, guard, manager
from tests.deploy.serving.running_haproxy import DOOR, Front, Router, running_front
from tests.end_to_end.asking import wait_for
from tests.patience import PATIENCE, SOON

SILENCE = 7.5  # seconds that a router says nothing: longer than any limit on clients
BODY = b'{"prompt": "x"}'
HEAD = b"POST /long HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
NUM_AT_ONCE = 4
LONG = b"{" * 200_000  # more than a buffer holds
LAST = b"1\r\nb\r\n0\r\n\r\n"
PARTS = b"1\r\na\r\n" + LAST

calls: list[bytes] = []  # paths of those that the router ended without an answer
came: queue.SimpleQueue[float] = queue.SimpleQueue()  # when the router had the head of a call
left: queue.SimpleQueue[float] = queue.SimpleQueue()  # when it saw that the client had gone
go_on = threading.Event()


def answer(connection: socket.socket, head: bytes) -> None:
    """Answer at once, late, in parts with a long silence, or only watch the client."""
    path = head.split()[1]
    if path == b"/short":
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    elif path == b"/gives/up":
        connection.sendall(
            b"HTTP/1.1 408 Late\r\nContent-Length: 2\r\nX-Request-Id: job-7\r\n\r\nno"
        )
    elif path == b"/late":
        time.sleep(SILENCE)
        connection.sendall(CHUNKED + LAST)
    elif path == b"/parts":
        connection.sendall(CHUNKED + b"1\r\na\r\n")
        go_on.wait(PATIENCE)
        connection.sendall(LAST)
    elif path == b"/echo":
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(head), head))
    elif path.startswith(b"/dies"):
        calls.append(path)
        if calls.count(path) == 2:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    else:
        came.put(time.monotonic())
        with suppress(ConnectionResetError):
            while connection.recv(65536):
                continue
        left.put(time.monotonic())


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    """One HAProxy for all tests."""
    with running_front(answer) as running:
        yield running


def read_all(client: socket.socket) -> bytes:
    """Return what comes until HAProxy closes a connection."""
    received = b""
    while part := client.recv(65536):
        received += part
    return received


def is_told_to_be_late(received: bytes) -> bool:
    """Tell whether an answer says with 408 that a body has not come in time, in both shapes."""
    head, _, body = received.partition(b"\r\n\r\n")
    told, message = json.loads(body), "the body has not come in time"
    assert (told["type"], told["error"]["type"]) == ("error", "timeout_error")
    return head.startswith(b"HTTP/1.1 408 ") and told["error"]["message"] == message


def request_id_of(received: bytes) -> bytes:
    """Return what an answer calls its request."""
    lines = received.partition(b"\r\n\r\n")[0].splitlines()
    return next(line[14:] for line in lines if line.lower().startswith(b"x-request-id: "))


def ended_after(client: socket.socket) -> float:
    """Return the seconds until HAProxy closes a connection."""
    began = time.monotonic()
    read_all(client)
    return time.monotonic() - began


def wait_until_it_came(client: socket.socket) -> None:
    """Wait until the router has a call; tell what HAProxy has answered in its place."""
    try:
        came.get(timeout=SOON)
    except queue.Empty:
        client.settimeout(1)
        with suppress(TimeoutError):
            raise AssertionError(f"HAProxy itself answered {client.recv(65536)!r}") from None
        raise


def test_a_client_that_leaves_is_noticed_at_once_however_its_request_came(front: Front) -> None:
    for pause in (0, 0.05):
        for _ in range(20):
            with front.connect() as client:
                client.sendall(HEAD)
                time.sleep(pause)
                client.sendall(BODY)
                wait_until_it_came(client)  # HAProxy drops what its client leaves before that
                time.sleep(0.05)
            closed = time.monotonic()
            assert left.get(timeout=SOON) - closed < SOON


def test_whoever_sends_no_request_or_half_of_a_head_is_sent_away(front: Front) -> None:
    with front.connect() as idle, front.connect() as half:
        half.sendall(HEAD[:20])
        assert ended_after(half) < DOOR.idle_timeout - 0.5
        assert ended_after(idle) < DOOR.idle_timeout - 0.5


def test_whoever_sends_half_of_a_short_body_is_told_so_and_no_router_hears_of_it(
    front: Front,
) -> None:
    ids = set()
    for _ in range(2):
        with front.connect() as half:
            began = time.monotonic()
            half.sendall(HEAD + BODY[:5])
            received = read_all(half)
            seconds = time.monotonic() - began
        assert is_told_to_be_late(received)
        ids.add(request_id_of(received))
    assert len(ids) == 2
    assert DOOR.short_body_timeout - 0.5 < seconds < DOOR.short_body_timeout + SOON
    assert came.empty()


def test_whoever_sends_half_of_a_long_body_is_sent_away(front: Front) -> None:
    with front.connect() as half:
        half.sendall(b"POST /long HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n" + LONG)
        assert DOOR.idle_timeout - 0.5 < ended_after(half) < DOOR.idle_timeout + SOON
    came.get(timeout=SOON)
    left.get(timeout=SOON)


def test_whoever_is_told_that_its_body_is_late_is_sent_away_at_once(front: Front) -> None:
    with front.connect() as half:
        began = time.monotonic()
        half.sendall(b"POST /gives/up HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n")
        half.sendall(LONG)
        received = read_all(half)
        assert time.monotonic() - began < DOOR.idle_timeout - 0.5
    assert is_told_to_be_late(received)
    assert request_id_of(received) == b"job-7"


def test_an_answer_may_be_silent_for_longer_than_a_client_may(front: Front) -> None:
    go_on.clear()
    with front.connect() as late, front.connect() as slow:
        for client, path in ((late, b"late"), (slow, b"parts")):
            client.sendall(b"GET /%b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path)
        time.sleep(SILENCE)
        assert DOOR.idle_timeout + 1 < SILENCE
        go_on.set()
        assert read_all(late).endswith(LAST)
        assert read_all(slow).endswith(PARTS)


def posted(front: Front, path: str, body: bytes, pause: float = 0.0) -> bytes:
    """Return the first line of what is said to a POST, whose body comes later than its head."""
    with front.connect() as client:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + (b"" if pause else body))
        if pause:
            time.sleep(pause)
            client.sendall(body)
        return client.recv(65536).partition(b"\r\n")[0]


@pytest.mark.parametrize("pause", [0.0, 0.3], ids=["at-once", "head-first"])
def test_a_call_whose_router_dies_before_it_answers_is_made_again(
    front: Front, pause: float
) -> None:
    body, path = b"x" * 40_000, f"/dies/{pause}/completions"
    assert posted(front, path, body, pause).endswith(b"200 OK")
    assert calls.count(path.encode()) == 2


def test_calls_at_a_lone_router_that_dies_are_made_again_where_serve_lets_them_wait() -> None:
    fronts: list[Front] = []
    dying: list[bytes] = []

    def die(connection: socket.socket, head: bytes) -> None:
        """Answer what is short; of others none, and once all are there take no more."""
        if head.startswith(b"GET /short"):
            answer(connection, head)
            return
        dying.append(head)
        if len(dying) == NUM_AT_ONCE:
            fronts[0].router.close()
        wait_for(lambda: len(dying) == NUM_AT_ONCE)

    def let_wait(connection: socket.socket, head: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    serve = Router(let_wait)
    with (
        running_front(die, fallback=serve) as front,
        ThreadPoolExecutor(NUM_AT_ONCE) as clients,
    ):
        fronts.append(front)
        asked = [clients.submit(posted, front, "/v1/completions", BODY) for _ in range(NUM_AT_ONCE)]
        assert [one.result() for one in asked] == [b"HTTP/1.1 200 OK"] * NUM_AT_ONCE
        assert front.status() == 200
    serve.close()


def test_a_call_that_changes_something_is_never_made_again(front: Front) -> None:
    assert b" 503 " in posted(front, "/dies/load_lora_adapter", BODY)
    assert calls.count(b"/dies/load_lora_adapter") == 1


def test_a_router_is_told_where_a_call_came_from_behind_what_its_client_says(front: Front) -> None:
    with front.connect() as client:
        client.sendall(b"GET /echo HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 192.0.2.7\r\n\r\n")
        lines = client.recv(65536).lower().split(b"\r\n")
    told = [line.partition(b": ")[2] for line in lines if line.startswith(b"x-forwarded-for")]
    assert told == [b"192.0.2.7", b"127.0.0.1"]


def test_haproxy_that_dies_is_soon_back(front: Front) -> None:
    before = front.managers[0].reload()
    for number in (signal.SIGKILL, signal.SIGTERM):
        os.kill(before, number)
        began = time.monotonic()
        wait_for(lambda: front.status() == 200)
        assert time.monotonic() - began < SOON
        after = front.managers[0].reload()  # Serve goes on with it
        assert after != before
        before = after


def test_haproxy_goes_on_without_its_manager_and_the_next_one_takes_it_over(front: Front) -> None:
    pid = front.managers[0].reload()
    go_on.clear()
    with front.connect() as client:
        client.sendall(b"GET /parts HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = client.recv(65536)
        os.killpg(front.managers[0].process.pid, signal.SIGKILL)  # as the raylet does
        front.managers[0].process.wait(PATIENCE)
        assert front.status() == 200
        front.managers.append(front.start_manager())
        assert front.managers[-1].first_pid == pid
        assert front.status() == 200
        assert front.managers[-1].reload() != pid
        assert front.status() == 200
        go_on.set()
        received += read_all(client)
    assert received.endswith(PARTS)


def test_a_haproxy_that_dies_with_its_manager_is_started_as_it_was(front: Front) -> None:
    pid = front.managers[-1].reload()
    os.killpg(front.managers[-1].process.pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    front.managers[-1].process.wait(PATIENCE)
    assert front.status() == 0
    front.managers.append(front.start_manager())
    assert front.status() == 200  # without a word from Serve
    assert front.managers[-1].reload() != pid


def test_calls_that_no_router_answers_get_503_and_those_that_run_go_on(front: Front) -> None:
    directory = front.folder.parent
    go_on.clear()
    with front.connect() as client:
        client.sendall(b"GET /parts HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = client.recv(65536)
        wait_for(lambda: admin.num_in_flight(directory) == 1)
        admin.refuse_calls(directory)
        with front.connect() as other:
            other.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            refusal = read_all(other)
        head, _, body = refusal.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in head.splitlines()
        assert json.loads(body)["error"]["type"] == "server_error"
        go_on.set()
        received += read_all(client)
    assert received.endswith(PARTS)
    wait_for(lambda: admin.num_in_flight(directory) == 0)


@pytest.mark.parametrize(
    ("files", "connections"),
    [(4096, 1536), (20_000, 7897), (10**6, 20_000), (resource.RLIM_INFINITY, 20_000)],
)
def test_as_many_connections_are_taken_as_haproxy_may_open_files_for(
    monkeypatch: pytest.MonkeyPatch, files: int, connections: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, files))
    assert manager.max_connections() == connections


def test_the_guard_ends_haproxy_when_the_raylet_has_gone(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    raylet = subprocess.Popen(sleep)
    proxy = subprocess.Popen([*sleep, f"{tmp_path}/haproxy.cfg"])
    other = subprocess.Popen([*sleep, f"{tmp_path}-2/haproxy.cfg"])
    command = [sys.executable, "-I", "-S", guard.__file__, str(raylet.pid), str(tmp_path)]
    watching = subprocess.Popen(command)
    try:
        wait_for((tmp_path / "guard.lock").exists)
        time.sleep(0.5)
        assert subprocess.run(command, timeout=PATIENCE).returncode == 0  # one is enough
        assert watching.poll() is None and proxy.poll() is None
        raylet.kill()
        raylet.wait(PATIENCE)
        assert proxy.wait(PATIENCE) == -signal.SIGKILL
        assert watching.wait(PATIENCE) == 0
        assert other.poll() is None
    finally:
        for process in (raylet, proxy, other, watching):
            process.kill()
            process.wait()
