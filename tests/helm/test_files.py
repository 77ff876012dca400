"""The two programs that the chart brings along, run as pods run them, against real servers."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.helm.charts import CHART, pod_templates, render, rendered, values_of
from tests.ports import free_port

PROBE = CHART / "files" / "probe.py"


@contextmanager
def server(answers: dict[str, tuple[int, Any]]) -> Iterator[tuple[int, list[Any]]]:
    """Answer paths with status and JSON; yield the port and what was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            asked.append((self.path, self.headers.get("Authorization"), self.rfile.read(length)))
            status, body = answers.get(self.path, (404, {}))
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Keep quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield http.server_address[1], asked
        http.shutdown()
        thread.join()


def fault(mode: str, port: int, raylet_port: int) -> str:
    namespace: dict[str, Any] = {"__name__": "probe"}
    exec(compile(PROBE.read_text(), str(PROBE), "exec"), namespace)
    reason: str = namespace["fault"](mode, port, raylet_port)
    return reason


@pytest.mark.parametrize(
    ("mode", "health", "reason"),
    [
        ("ranks", 200, ""),
        ("ranks", 503, "the ranks make no progress"),
        ("ranks", 404, ""),  # Serve is there, the application is not: no fault of this pod
        ("proxy", 503, ""),
        ("server", 200, ""),
        ("server", 503, "the ranks make no progress"),
    ],
)
def test_a_probe_tells_progress(mode: str, health: int, reason: str) -> None:
    with server({"/health": (health, {}), "/api/healthz": (200, {})}) as (port, _):
        assert fault(mode, port, port) == reason


def test_a_pod_in_which_nobody_serves_lives_unless_it_should_serve() -> None:
    with server({"/api/healthz": (200, {})}) as (raylet, _):
        assert fault("ranks", free_port(), raylet) == ""
        assert fault("proxy", free_port(), raylet) == "Serve does not answer"
    assert fault("server", free_port(), free_port()) == "the server does not answer"


@pytest.mark.parametrize("mode", ["ranks", "proxy"])
def test_a_pod_whose_raylet_is_gone_does_not_live(mode: str) -> None:
    with server({"/health": (200, {}), "/-/healthz": (200, {})}) as (port, _):
        assert fault(mode, port, free_port()) == "the raylet does not answer"


def test_the_probe_runs_as_the_pod_runs_it() -> None:
    (container,) = pod_templates(rendered("deployment"))["server"]["spec"]["containers"]
    command = container["livenessProbe"]["exec"]["command"]
    for health, status in ((200, 0), (503, 1)):
        with server({"/health": (health, {})}) as (port, _):
            here = [str(PROBE) if "probe.py" in word else word for word in command[:-1]]
            done = subprocess.run([sys.executable, *here[1:], str(port)], capture_output=True)
            assert done.returncode == status, done


def run_helm_test(values: dict[str, Any], port: int, key: str | None) -> tuple[int, str]:
    """Run the test pod's command with its environment, pointed at a port."""
    (container,) = pod_templates(render(values))["test"]["spec"]["containers"]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    environment["TOPWORK_URL"] = f"http://127.0.0.1:{port}"
    if "TOPWORK_API_KEY" in environment:
        environment["TOPWORK_API_KEY"] = key
    command = [sys.executable, *container["command"][1:], *container["args"]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout


SERVING = {
    "/ready": (200, {"status": "ready"}),
    "/v1/models": (200, {"data": [{"id": "base"}]}),
    "/v1/completions": (200, {"choices": []}),
}


def test_helm_test_asks_for_a_completion_with_the_key_it_was_given() -> None:
    with server(SERVING) as (port, asked):
        assert run_helm_test(values_of("hub"), port, "sesame") == (0, "requests are served\n")
    assert [path for path, _, _ in asked] == ["/ready", "/v1/models", "/v1/completions"]
    assert asked[-1][1] == "Bearer sesame"
    assert json.loads(asked[-1][2]) == {"model": "base", "prompt": "One", "max_tokens": 1}


def test_helm_test_without_a_key_asks_only_whether_requests_are_served() -> None:
    with server(SERVING) as (port, asked):
        assert run_helm_test(values_of("minimal-cpu"), port, None)[0] == 0
    assert [path for path, _, _ in asked] == ["/ready"]


def test_helm_test_says_what_the_server_says_when_it_fails() -> None:
    values = values_of("hub")
    with server(SERVING | {"/v1/completions": (401, {"error": "who?"})}) as (port, _):
        assert run_helm_test(values, port, "wrong") == (
            1,
            '/v1/completions: 401 {"error": "who?"}\n',
        )
    values["tests"]["timeoutSeconds"] = 1
    with server({"/ready": (503, {"status": "not ready"})}) as (port, _):
        assert run_helm_test(values, port, "k") == (1, '/ready: 503 {"status": "not ready"}\n')
