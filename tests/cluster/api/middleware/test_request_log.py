"""Each call is one line of the request log, with what is known of it."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.errors import ErrorInfo
from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from tests.cluster.api.middleware.test_rate_limits import CALLS, PROMPT
from tests.cluster.api.routes.test_streams import events_of, read_on
from tests.cluster.conftest import Serving
from tests.end_to_end.asking import wait_for
from tests.patience import PATIENCE

Start = Callable[..., Serving]
HEADERS = {
    "Authorization": "Bearer first key",
    "X-Request-Id": "job-7",
    "X-Forwarded-For": "192.0.2.7, 10.0.0.1",
}
ASK = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "ignore_eos": True}


@pytest.fixture
def logged(serve: Start, tmp_path: Path, model_dir: Path) -> Start:
    """Return a function that serves one key, with a log at `path_of`."""

    def start(*fakes: Any, limits: dict[str, int] | None = None, **changes: Any) -> Serving:
        keys = tmp_path / "keys.yaml"
        key = {"key": "first key", "tenant": "acme", "name": "app", "adapters": "*"}
        keys.write_text(yaml.safe_dump([{**key, "limits": limits or {}}]))
        log = str(tmp_path / "calls")
        return serve(
            *(fakes or (FakeScheduler(),)), api_key_file=str(keys), request_log=log, **changes
        )

    return start


def path_of(serving: Serving) -> Path:
    return Path(serving.router.config.request_log or "")


def lines(serving: Serving, count: int) -> list[dict[str, Any]]:
    """Wait for so many lines, and return what they say."""

    def found() -> list[str]:
        return path_of(serving).read_text().splitlines()

    wait_for(lambda: len(found()) >= count)
    assert len(found()) == count
    return [json.loads(line) for line in found()]


def post(serving: Serving, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
    return httpx.post(serving.url + path, json=body, headers=HEADERS, timeout=PATIENCE)


def test_a_line_says_who_asked_what_and_what_came_of_it(logged: Start) -> None:
    serving = logged(FakeScheduler(lambda _: Script(num_cached_tokens=1)))
    assert post(serving, {**ASK, "n": 2}).status_code == 200
    (line,) = lines(serving, 1)
    moments = [line.pop(name) for name in ("queue_seconds", "ttft_seconds", "seconds")]
    assert 0 <= moments[0] <= moments[1] <= moments[2]
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "router": serving.router.router_id,
        "request_id": "job-7",
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "stream": False,
        "tenant": "acme",
        "key": "app",
        "model": "tiny",
        "choices": 2,
        "client": "10.0.0.1",  # by uvicorn
        "forwarded_for": "192.0.2.7, 10.0.0.1",
        "prompt_tokens": 4,
        "cached_tokens": 1,
        "generated_tokens": 6,
        "finish_reasons": ["length"],
        "replicas": ["0"],
        "attempts": 1,
    }


@pytest.mark.parametrize("path", [*CALLS, "/tokenize"])
def test_every_route_that_computes_has_a_line(logged: Start, path: str) -> None:
    serving = logged()
    reply = post(serving, {"model": "tiny", **CALLS.get(path, {"prompt": "a"})}, path)
    (line,) = lines(serving, 1)
    assert (line["status"], line["tenant"]) == (reply.status_code, "acme")
    assert line["route"] == path


def test_an_adapter_is_told_by_name_and_digest(logged: Start) -> None:
    serving = logged()
    serving.run(serving.backend.load("law", "/a/1", False, False))
    digest = serving.run(serving.backend.record("law")).digest
    assert post(serving, {**ASK, "model": "law"}).status_code == 200
    (line,) = lines(serving, 1)
    assert (line["model"], line["adapter"]) == ("law", digest[:12])


def test_calls_that_fail_early_have_lines_with_what_is_known(logged: Start) -> None:
    serving = logged(limits={"requests_per_minute": 3})
    url = f"{serving.url}/v1/completions"
    httpx.post(url, json=ASK, timeout=PATIENCE)
    httpx.post(url, json=ASK, headers={"Authorization": "Bearer none"}, timeout=PATIENCE)
    httpx.post(f"{serving.url}/nowhere/else", timeout=PATIENCE)
    post(serving, {**ASK, "temperature": "hot"})
    post(serving, {**ASK, "model": "nobody"})
    post(serving, ASK)
    post(serving, ASK)
    told = [
        (line["status"], line.get("error"), line.get("tenant"), "prompt_tokens" in line)
        for line in lines(serving, 7)
    ]
    assert told == [
        (401, "Unauthorized", None, False),
        (401, "Unauthorized", None, False),
        (404, "NotFound", None, False),
        (400, "InvalidRequest", "acme", False),
        (404, "NotFound", "acme", False),
        (200, None, "acme", True),
        (429, "Overloaded", "acme", False),
    ]
    assert lines(serving, 7)[2]["route"] == "_other"
    assert lines(serving, 7)[6]["code"] == "rate_limit_exceeded"


def test_probes_and_scrapes_have_no_lines(logged: Start) -> None:
    serving = logged()
    for path in ("/health", "/ready", "/ping", "/version", "/metrics", "/docs"):
        httpx.get(serving.url + path, headers=HEADERS, timeout=PATIENCE)
    httpx.get(f"{serving.url}/v1/models", headers=HEADERS, timeout=PATIENCE)
    (line,) = lines(serving, 1)
    assert (line["method"], line["route"]) == ("GET", "/v1/models")


def test_a_stream_has_one_line_at_its_end(logged: Start) -> None:
    serving = logged()
    assert post(serving, {**ASK, "stream": True}).text.endswith("[DONE]\n\n")
    (line,) = lines(serving, 1)
    assert (line["stream"], line["status"], line["generated_tokens"]) == (True, 200, 3)


def test_a_client_that_goes_away_is_told_of(
    logged: Start, saying: Callable[..., tuple[int, ...]]
) -> None:
    serving = logged(FakeScheduler(lambda _: Script(saying("abc"), pauses_after=1)))
    with httpx.stream(
        "POST",
        f"{serving.url}/v1/completions",
        json={**ASK, "stream": True},
        headers=HEADERS,
        timeout=PATIENCE,
    ) as reply:
        next(reply.iter_lines())
    (line,) = lines(serving, 1)
    assert (line["status"], line["disconnected"], line["generated_tokens"]) == (200, True, 1)
    assert "finish_reasons" not in line


def test_a_client_that_goes_away_before_its_answer_is_told_of(logged: Start) -> None:
    serving = logged(FakeScheduler(lambda _: Script(is_silent=True)))
    body = json.dumps(ASK).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer first key\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(serving.url.rpartition(":")[2]))) as raw:
        raw.sendall(head.encode() + body)
        wait_for(lambda: serving.router.num_in_flight == 1)
    (line,) = lines(serving, 1)
    assert (line["status"], line["disconnected"]) == (499, True)


def test_an_error_behind_the_beginning_of_a_stream_is_told(
    logged: Start, saying: Callable[..., tuple[int, ...]]
) -> None:
    broken = ErrorInfo("Internal", "a rank is out of its mind")
    serving = logged(FakeScheduler(lambda _: Script(saying("a", ends=False), error=broken)))
    post(serving, {**ASK, "stream": True})
    (line,) = lines(serving, 1)
    assert (line["status"], line["error"], line["generated_tokens"]) == (200, "Internal", 1)


def test_an_answer_that_goes_on_elsewhere_tells_where(logged: Start) -> None:
    lost: list[str] = []

    def script(_: Any) -> Script:
        lost.append("x")
        return Script(dies_after=1) if len(lost) == 1 else Script()

    serving = logged(FakeScheduler(script), FakeScheduler(script, replica="1"))
    assert post(serving, ASK).status_code == 200
    (line,) = lines(serving, 1)
    assert line["attempts"] == 2 and sorted(line["replicas"]) == ["0", "1"]
    assert line["generated_tokens"] == 3


def test_a_response_in_the_background_has_its_line_when_it_has_ended(
    routers: tuple[Serving, Serving], logged: Start, engine: Any
) -> None:
    from tests.cluster.api.real_engine import Same

    serving = logged(Same(engine))
    body = {"model": "tiny", "input": "a", "background": True, "max_output_tokens": 40}
    reply = post(serving, body, "/v1/responses")
    assert reply.status_code == 200, reply.text
    (line,) = lines(serving, 1)
    assert line["route"] == "/v1/responses" and line["generated_tokens"] > 0
    assert line["finish_reasons"]


def test_a_stream_that_is_read_on_has_a_line_for_each_reader(
    routers: tuple[Serving, Serving], logged: Start, engine: Any
) -> None:
    from tests.cluster.api.real_engine import Same

    serving = logged(Same(engine))
    body = {
        **ASK,
        "max_tokens": 80,
        "stream": True,
        "stream_options": {"resumable": True, "include_usage": True},
    }
    with httpx.stream(
        "POST", f"{serving.url}/v1/completions", json=body, headers=HEADERS, timeout=PATIENCE
    ) as r:
        last = next(event_id for event_id, _ in events_of(r.iter_lines()))
    assert read_on(serving.url, last, HEADERS).status_code == 200
    both = lines(serving, 2)
    assert sum(line["generated_tokens"] for line in both) == 80
    assert {line["route"] for line in both} == {"/v1/completions", "/v1/streams/{stream_id}"}


def test_prompts_and_answers_are_there_only_where_they_are_asked_for(
    serve: Start, tmp_path: Path, saying: Callable[..., tuple[int, ...]]
) -> None:
    path = tmp_path / "calls"
    for wanted in (False, True):
        serving = serve(
            FakeScheduler(lambda _: Script(saying("brown fox"))),
            request_log=str(path),
            request_log_content=wanted,
        )
        post(serving, {"model": "tiny", "prompt": "the lazy dog", "max_tokens": 30})
        line = lines(serving, 1 + wanted)[-1]
        assert (line.get("prompts") == ["the lazy dog"]) == wanted
        assert ("brown fox" in line.get("answers", [""])[0]) == wanted
    assert path.read_text().count("lazy dog") == 1


def test_headers_cannot_forge_lines(logged: Start) -> None:
    serving = logged()
    forged = b'1.2.3.4\x85\x9b2J"}{"status":200}'
    body = json.dumps(ASK).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body)
    head += b"X-Request-Id: a\tb\x9bc\r\nX-Forwarded-For: " + forged + b"\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(serving.url.rpartition(":")[2]))) as raw:
        raw.sendall(head + body)
        assert b" 401 " in raw.recv(4096)
    (line,) = lines(serving, 1)
    assert line["request_id"] == "abc" and line["status"] == 401
    assert path_of(serving).read_bytes()[:-1].isascii()
