"""The request log of a real server, and that no secret is in what any of its parts wrote."""

import json
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.asking import wait_for
from tests.end_to_end.conftest import KEY
from tests.end_to_end.server import Server
from tests.patience import PATIENCE

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]  # `make test-servers`

WRONG = "sk-WRONGMARK-0123456789"
MARK = b"MARK"  # in each secret
CHAT: dict[str, Any] = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Say PROMPTMARK."}],
    "max_tokens": 8,
    "cache_salt": "SALTMARK",
    "stop": ["STOPMARK"],
}
TOOLS = [
    {"role": "user", "content": "PROMPTMARK"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c",
                "type": "function",
                "function": {"name": "f", "arguments": '{"a":"TOOLMARK"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "TOOLMARK"},
]


def folders_of(server: Server) -> set[Path]:
    """Return where the server's processes write their logs, by the files that they have open."""
    found = set()
    for pid in server.processes():
        with suppress(FileNotFoundError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    path = Path(os.readlink(link))
                    if path.parent.name == "logs" and path.parent.parent.name.startswith(
                        "session_"
                    ):
                        found.add(path.parent)
    return found


def lines_of(folders: set[Path]) -> list[dict[str, Any]]:
    """Return the lines of the request log that are in files of standard error."""
    return [
        json.loads(text)
        for folder in folders
        for path in sorted(folder.glob("worker-*.err"))
        for text in path.read_text(errors="replace").splitlines()
        if text.startswith('{"time"')
    ]


def post(server: Server, body: Any, path: str = "/v1/chat/completions", key: str = KEY) -> int:
    headers = {"Authorization": f"Bearer {key}", "User-Agent": "HEADERMARK", "Cookie": "HEADERMARK"}
    url = f"{server.url}{path}?token=QUERYMARK"
    return httpx.post(url, json=body, headers=headers, timeout=PATIENCE).status_code


def cut(server: Server, body: dict[str, Any]) -> None:
    """Go away while an answer is on its way."""
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE) as reply:
        next(reply.iter_lines())


def break_off(server: Server) -> None:
    """Send what is no HTTP, and halves of bodies.

    HAProxy waits for short bodies: no router hears of the first half; one does of the second.
    """
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode()
    for sent in (
        b"HEADERMARK\r\n\r\n",
        b"POST /v1/PROMPTMARK HTTP/1.1\r\nHost: HEADERMARK\x00\r\n\r\n",
        post + b"\r\nContent-Length: 99\r\n\r\n{PROMPTMARK",
        post + b"\r\nContent-Length: 999999\r\n\r\n{" + b"PROMPTMARK" * 20_000,
    ):
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(sent)


def test_calls_are_told_and_their_secrets_are_in_no_log_of_any_part(keyed: Server) -> None:
    folders = folders_of(keyed)
    assert folders, "nobody of the server writes logs"
    assert post(keyed, CHAT) == 200
    assert post(keyed, {**CHAT, "model": "pirate-not-there-PROMPTMARK"}) == 404
    assert post(keyed, CHAT, key=WRONG) == 401
    for wrong in ({"temperature": "PROMPTMARK"}, {"PROMPTMARK": 1}, {"messages": "PROMPTMARK"}):
        assert post(keyed, {**CHAT, **wrong}) == 400
    post(keyed, {**CHAT, "messages": TOOLS})
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "PROMPTMARK"}}}
    assert post(keyed, {**CHAT, "response_format": form}) == 400
    assert post(keyed, {"model": "smollm2", "input": "PROMPTMARK"}, "/v1/embeddings") == 200
    short = {"model": "smollm2", "input": "PROMPTMARK", "max_output_tokens": 8}
    assert post(keyed, short, "/v1/responses") == 200
    assert post(keyed, {"prompt": "PROMPTMARK"}, "/tokenize") == 200
    cut(keyed, {**CHAT, "max_tokens": 500, "ignore_eos": True, "stream": True, "stop": []})
    break_off(keyed)
    assert post(keyed, {**CHAT, "stream": True}) == 200

    def ended() -> list[dict[str, Any]]:
        lines = (line for line in lines_of(folders) if line["route"] != "_other")
        return [line for line in lines if line.get("key") != "admin"]

    wait_for(lambda: sum("disconnected" in line for line in ended()) >= 1, ended)
    wait_for(lambda: len(ended()) >= 14, ended)
    told = ended()
    assert {line["status"] for line in told} >= {200, 400, 401, 404}
    answered = [line for line in told if line["status"] == 200 and "queue_seconds" in line]
    for line in answered:
        assert line["tenant"] == "acme" and line["key"] == "app" and line["model"] == "smollm2"
        assert line["queue_seconds"] <= line["seconds"]
    wait_for(lambda: '"route":"/v1/chat/completions"' in keyed.log.read_text())
    found = [keyed.log, *(path for folder in folders for path in folder.rglob("*"))]
    told_by = [path for path in found if path.is_file() and MARK in path.read_bytes()]
    assert told_by == []


def test_what_the_last_calls_used_is_in_the_file_when_the_server_has_been_told_to_end(
    last_keyed: Server,
) -> None:
    usage = last_keyed.log.with_name("usage")
    before = sum(json.loads(line)["requests"] for line in usage.read_text().splitlines())
    for _ in range(3):
        assert post(last_keyed, CHAT) == 200
    last_keyed.process.send_signal(signal.SIGTERM)
    assert last_keyed.process.wait(PATIENCE) == 0
    told = sum(json.loads(line)["requests"] for line in usage.read_text().splitlines())
    assert told >= before + 3
