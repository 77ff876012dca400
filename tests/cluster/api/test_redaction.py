"""Nothing that a caller keeps secret is in any log, whatever becomes of its call."""

import json
import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.errors import ErrorInfo
from cluster.request import Request
from cluster.router.output_processor import OutputProcessor
from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from tests.cluster.conftest import Serving
from tests.end_to_end.asking import wait_for
from tests.patience import PATIENCE

KEY, WRONG = "sk-KEYMARK-0123456789", "sk-WRONGMARK-0123456789"
SECRETS = {
    "prompt": "PROMPTMARK",
    "salt": "SALTMARK",
    "tool": "TOOLMARK",
    "stop": "STOPMARK",
    "header": "HEADERMARK",
    "query": "QUERYMARK",
}
MARK = "MARK"  # in each of them
MESSAGES = [
    {"role": "user", "content": "PROMPTMARK of a user"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c1", "type": "function",
         "function": {"name": "f", "arguments": '{"where": "TOOLMARK"}'}}
    ]},
]  # fmt: skip
CHAT = {
    "model": "tiny",
    "messages": MESSAGES,
    "max_tokens": 4,
    "cache_salt": "SALTMARK",
    "stop": ["STOPMARK"],
    "user": "PROMPTMARK",
}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "PROMPTMARK", "cache_salt": "SALTMARK"},
    "/v1/responses": {"model": "tiny", "input": "PROMPTMARK", "instructions": "PROMPTMARK"},
    "/v1/messages": {
        "model": "tiny",
        "messages": MESSAGES[:1],
        "max_tokens": 4,
        "system": "TOOLMARK",
    },
    "/v1/embeddings": {"model": "tiny", "input": ["PROMPTMARK"]},
    "/v1/score": {"model": "tiny", "text_1": "PROMPTMARK", "text_2": "PROMPTMARK"},
    "/tokenize": {"model": "tiny", "prompt": "PROMPTMARK"},
    "/detokenize": {"model": "tiny", "tokens": ["PROMPTMARK"]},
}
WRONG_FIELDS: list[dict[str, Any]] = [
    {"temperature": "PROMPTMARK"},
    {"PROMPTMARK": 1},
    {"messages": "PROMPTMARK", "prompt": {"PROMPTMARK": 1}, "input": {"PROMPTMARK": 2}},
    {"model": "PROMPTMARK"},
    {"max_tokens": -1, "max_output_tokens": -1},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "PROMPTMARK", "schema": {"type": "PROMPTMARK"}},
        }
    },
    {"chat_template": "{{ 'PROMPTMARK' + 1 }}"},
    {"tools": [{"type": "function", "function": {"name": "PROMPTMARK", "parameters": "TOOLMARK"}}]},
]


class Everything(logging.Handler):
    """Keeps what all loggers say, as it would be written."""

    def __init__(self) -> None:
        super().__init__(0)
        self.setFormatter(logging.Formatter("%(name)s %(message)s"))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(("httpx", "httpcore")):  # of the test's own client
            self.lines.append(self.format(record))


@pytest.fixture
def everything() -> Iterator[Everything]:
    """Return what hears every logger at every level, also those that do not propagate."""
    heard, root = Everything(), logging.getLogger()
    # Access logs, which show queries, are switched off where the application is served.
    names = ["uvicorn", "uvicorn.error", "topwork", "topwork.audit", "asyncio"]
    loggers = [root, *map(logging.getLogger, names)]
    before = [(one, one.level, one.disabled) for one in loggers]
    for one in loggers:
        one.setLevel(logging.DEBUG if one is not logging.getLogger("asyncio") else logging.INFO)
        one.disabled = False
    root.addHandler(heard)
    for one in loggers[1:]:
        if not one.propagate:
            one.addHandler(heard)
    yield heard
    for one, level, disabled in before:
        one.setLevel(level)
        one.disabled = disabled
        one.removeHandler(heard)


@pytest.fixture
def serving(serve: Callable[..., Serving], tmp_path: Path, everything: Everything) -> Serving:
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        yaml.safe_dump([{"key": KEY, "tenant": "acme", "name": "app", "adapters": "*"}])
    )
    return serve(
        FakeScheduler(),
        api_key_file=str(keys),
        request_log=str(tmp_path / "calls"),
        trust_request_chat_template=True,
    )


def log_of(serving: Serving, count: int) -> list[dict[str, Any]]:
    path = Path(serving.router.config.request_log or "")
    wait_for(lambda: path.read_text().count("\n") >= count)
    return [json.loads(line) for line in path.read_text().splitlines()]


def check(serving: Serving, everything: Everything, count: int) -> None:
    """Assert that so many calls are logged, and that no secret is in what anything wrote."""
    assert len(log_of(serving, count)) == count
    text = Path(serving.router.config.request_log or "").read_text() + "\n".join(everything.lines)
    found = [line for line in text.splitlines() if MARK in line]
    assert not found, found[:3]


def post(serving: Serving, path: str, body: Any, key: str = KEY, **more: Any) -> httpx.Response:
    headers = {
        "Authorization": f"Bearer {key}",
        "Cookie": "session=HEADERMARK",
        "User-Agent": "HEADERMARK",
    }
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"{serving.url}{path}?token=QUERYMARK"
    return httpx.post(url, content=content, headers=headers, timeout=PATIENCE, **more)


def test_success_and_every_kind_of_mistake_leave_no_secret(
    serving: Serving, everything: Everything
) -> None:
    count = 0
    for path, body in PATHS.items():
        for wrong in ({}, *WRONG_FIELDS):
            post(serving, path, {**body, **wrong})
            count += 1
        for content in (b'{"prompt": "PROMPTMARK"', b"PROMPTMARK", b"[1, PROMPTMARK]", b"\xffMARK"):
            post(serving, path, content)
            count += 1
        post(serving, path, body, key=WRONG)
        count += 1
        if path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
            post(serving, path, {**body, "stream": True})
            count += 1
    check(serving, everything, count)


def test_bugs_are_logged_without_what_their_exceptions_say(
    serving: Serving, everything: Everything, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        try:
            raise KeyError("PROMPTMARK")
        except KeyError as error:
            raise ValueError(f"a bug with TOOLMARK and {KEY}") from error

    monkeypatch.setattr(serving.router, "encode", fail)
    reply = post(serving, "/v1/completions", PATHS["/v1/completions"])
    assert reply.status_code == 500 and reply.json()["error"]["message"].endswith("ValueError")
    assert reply.headers["x-request-id"]
    monkeypatch.undo()
    monkeypatch.setattr(OutputProcessor, "process", fail)
    assert post(serving, "/v1/completions", PATHS["/v1/completions"]).status_code == 500
    check(serving, everything, 2)
    told = [line for line in everything.lines if line.startswith("topwork.router request")]
    assert len(told) == 2
    assert "ValueError at " in told[0] and "caused by KeyError at " in told[0]
    assert "test_redaction.py" in told[0]
    assert [line["error"] for line in log_of(serving, 2)] == ["Internal", "Internal"]


def test_a_bug_behind_the_beginning_of_a_stream_breaks_it_off_and_says_nothing(
    serving: Serving, everything: Everything, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, calls = OutputProcessor.process, []

    def fail(self: OutputProcessor, event: Any) -> Any:
        calls.append(event)
        if len(calls) > 1:
            raise ValueError("a bug with PROMPTMARK")
        return process(self, event)

    monkeypatch.setattr(OutputProcessor, "process", fail)
    serving.schedulers[0]._script = lambda _: Script(pauses_after=1)
    url, headers = f"{serving.url}/v1/completions", {"Authorization": f"Bearer {KEY}"}
    body = {**PATHS["/v1/completions"], "stream": True, "ignore_eos": True}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE) as reply:
        rest = reply.iter_lines()
        next(rest)
        serving.schedulers[0].resume()
        with pytest.raises(httpx.RemoteProtocolError):
            list(rest)
    check(serving, everything, 1)
    assert any("ValueError at " in line for line in everything.lines)


def test_schedulers_that_fail_and_clients_that_leave_tell_nothing(
    serving: Serving, everything: Everything
) -> None:
    fake = serving.schedulers[0]
    for name in ("Internal", "Unavailable", "Overloaded", "InvalidRequest"):
        fake._script = lambda _, name=name: Script((), error=ErrorInfo(name, "PROMPTMARK"))
        if name != "Unavailable":  # which waits for another scheduler
            post(serving, "/v1/chat/completions", {**CHAT, "messages": MESSAGES[:1]})
    seen: list[Request] = []

    def silent(request: Request) -> Script:
        seen.append(request)
        return Script(is_silent=True)

    fake._script = silent
    body = json.dumps(PATHS["/v1/completions"]).encode()
    head = (
        f"POST /v1/completions?QUERYMARK HTTP/1.1\r\nHost: HEADERMARK\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    for sent in (head.encode() + body, head.encode() + body[:10]):
        with socket.create_connection(("127.0.0.1", int(serving.url.rpartition(":")[2]))) as raw:
            raw.sendall(sent)
            if sent.endswith(body):
                wait_for(lambda: bool(seen))
    check(serving, everything, 5)


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/completions HTTP/1.1\r\nAuthorization: HEADERMARK\x01\r\n\r\n",
        b"POST /PROMPTMARK HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
        b"HEADERMARK\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Basic HEADERMARK\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Api-Key: HEADERMARK\r\nX-Request-Id: \r\n\r\n",
        b"GET /v1/streams/QUERYMARK HTTP/1.1\r\nHost: x\r\nLast-Event-ID: QUERYMARK\r\n\r\n",
    ],
)
def test_hostile_heads_leave_nothing(serving: Serving, everything: Everything, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", int(serving.url.rpartition(":")[2]))) as raw:
        raw.sendall(head)
        raw.settimeout(PATIENCE)
        assert b" 4" in raw.recv(4096)[:13]
    assert post(serving, "/v1/completions", PATHS["/v1/completions"]).status_code == 200
    log = Path(serving.router.config.request_log or "")
    wait_for(lambda: "/v1/completions" in log.read_text())
    text = log.read_text() + "\n".join(everything.lines)
    assert MARK not in text
