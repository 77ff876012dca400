"""`topwork status` of servers that are well, that are not, and that are none."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler
from deploy.cli.status import GAUGES, measured
from deploy.observability.page import page
from tests.deploy.cli.command_line import topwork


def status(url: str, code: int = 0, **environment: str) -> dict[str, Any]:
    done = topwork("status", "--url", url, **environment)
    assert (done.exit_code, done.stderr) == (code, ""), done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_server_that_is_well_is_shown_with_all_its_schedulers(
    serve: Callable[..., Any],
) -> None:
    serving = serve(FakeScheduler(), FakeScheduler(replica="1"))
    httpx.post(
        f"{serving.url}/v1/load_lora_adapter", json={"lora_name": "law", "lora_path": "/a/1"}
    )
    found = status(f"{serving.url}/v1/")
    schedulers = found.pop("schedulers")
    assert found == {
        "url": serving.url,
        "version": "1.2.3",
        "model": "tiny",
        "healthy": True,
        "ready": True,
        "reasons": [],
        "details": True,
        "adapters": {"device": 0, "host": 1, "disk": 0, "gone": 0} | found["adapters"],
        "adapter_pool_up": True,
    }
    assert found["adapters"]["host"] == 1
    assert [one["replica"] for one in schedulers] == ["0", "1"]
    assert schedulers[0] == {
        "replica": "0",
        "up": True,
        "ready": True,
        "healthy": True,
        "step": 0,
        "running": 0,
        "waiting": 0,
        "slots": 4,
        "slots_used": 0,
        "kv_pages": 100,
        "kv_pages_held": 0,
        "kv_pages_cached": 0,
        "ranks_alive": 1,
    }


def test_every_gauge_that_is_looked_for_is_one() -> None:
    for metric in GAUGES.values():
        assert f"| `{metric}` | gauge |" in page()


def test_a_scheduler_that_is_not_well_is_named_with_the_reason(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    serving.schedulers[0].reason = "rank 1 hangs"
    found = status(serving.url, code=1)
    assert (found["healthy"], found["ready"]) == (False, False)
    assert found["reasons"] == ["scheduler 0: rank 1 hangs"]
    assert found["schedulers"][0]["healthy"] is False


def test_a_server_that_drains_is_healthy_and_not_ready(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    httpx.post(f"{serving.url}/v1/drain")
    found = status(serving.url, code=1)
    assert (found["healthy"], found["ready"], found["reasons"]) == (True, False, ["draining"])


def test_what_a_key_may_not_know_is_not_shown(
    serve: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "- {key: user-secret, tenant: t}\n- {key: watch-secret, tenant: t, scopes: [metrics]}\n"
    )
    serving = serve(FakeScheduler(), api_key_file=str(keys))
    serving.schedulers[0].reason = "rank 1 hangs"
    nobody = status(serving.url, code=1)
    assert (nobody["model"], nobody["details"], nobody["schedulers"]) == (None, False, [])
    assert nobody["reasons"] == ["unhealthy", "not ready"]
    user = status(serving.url, code=1, TOPWORK_API_KEY="user-secret")
    assert (user["model"], user["details"], user["schedulers"]) == ("tiny", False, [])
    watch = status(serving.url, code=1, TOPWORK_API_KEY="watch-secret")
    assert (watch["details"], len(watch["schedulers"])) == (True, 1)
    assert watch["reasons"] == ["scheduler 0: rank 1 hangs"]
    monkeypatch.setattr("deploy.cli.status.wants_json", lambda asked: asked)
    shown = topwork("status", "--url", serving.url).stdout.splitlines()
    assert shown[-1].split(maxsplit=1)[1] == "not told without a key that has the scope metrics"


def test_a_person_at_a_terminal_sees_lines_and_a_table(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = serve(FakeScheduler())
    monkeypatch.setattr("deploy.cli.status.wants_json", lambda asked: asked)
    lines = topwork("status", "--url", serving.url).stdout.splitlines()
    assert lines[0].split() == ["server", f"{serving.url},", "Topwork", "1.2.3"]
    assert [line.split() for line in lines[1:5]] == [
        ["model", "tiny"],
        ["health", "ok"],
        ["ready", "yes"],
        ["adapters", "none"],
    ]
    assert lines[-1].split() == ["0", "healthy", "0", "0", "0/4", "0/100", "(0%)", "1"]


def test_a_scheduler_that_does_not_answer_is_shown_as_far_as_it_is_known() -> None:
    found = measured('topwork_scheduler_up{replica="a"} 0\n')
    assert found["schedulers"] == [{"replica": "a", "up": False}]


@pytest.mark.parametrize(
    "text", ["", "<html>no metrics</html>", 'topwork_scheduler_up{x="a"} 1\n', "a{"]
)
def test_what_is_no_metric_says_nothing(text: str) -> None:
    assert measured(text)["schedulers"] == []


@pytest.fixture
def stranger() -> Iterator[Callable[[bytes], str]]:
    """Return a function that serves the same bytes on all routes, and returns where."""
    servers = []

    def serve_bytes(answer: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield serve_bytes
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\n\r\n<html>hello</html>",
        b"HTTP/1.0 404 Not Found\r\n\r\nnothing here",
        b"HTTP/1.0 503 Service Unavailable\r\n\r\n",
        b"not HTTP at all\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 100_000,
        b"HTTP/1.0 401 Unauthorized\r\n\r\n" + b'{"error": {"message": "\\u001b[2J"}}',
        b"HTTP/1.0 500 No\r\n\r\n" + b'{"error": null}',
    ],
)
@pytest.mark.parametrize("command", [("status",), ("adapters", "list"), ("chat",)])
def test_what_is_no_topwork_server_is_told_in_a_line(
    stranger: Callable[[bytes], str], command: tuple[str, ...], answer: bytes
) -> None:
    said = topwork(*command, "--url", stranger(answer))
    assert (said.exit_code, said.stdout) == (2, ""), said.output
    assert said.stderr.startswith("error ") and len(said.stderr.splitlines()) == 1
    assert "\x1b" not in said.stderr


@pytest.mark.parametrize("body", [b"{}", b"[]", b"1", b'{"data": [{}], "has_more": 0}'])
def test_json_of_something_else_is_no_traceback(
    stranger: Callable[[bytes], str], body: bytes
) -> None:
    url = stranger(b"HTTP/1.0 200 OK\r\n\r\n" + body)
    for command in (("status",), ("adapters", "list"), ("adapters", "pin", "x"), ("chat",)):
        said = topwork(*command, "--url", url)
        assert isinstance(said.exception, SystemExit) or said.exception is None, (
            command,
            said.exception,
        )
