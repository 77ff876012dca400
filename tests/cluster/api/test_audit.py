"""Every administrative call is in the audit log, with who, what, from where, and how it ended."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.cluster.api.openapi.test_real_calls import ENCODED, WEIGHTS
from tests.patience import PATIENCE

KEYS = """
- {key: root-secret, tenant: ops, name: deploys, admin: true, adapters: "*"}
- {key: user-secret, tenant: acme}
- {key: ends-secret, tenant: acme, expires: 2001-01-01T00:00:00Z}
"""
NAMED = {"lora_name": "law", "lora_path": "/a/1"}
# Each administrative call, as it succeeds after those before it.
CALLS: list[tuple[str, str, str, dict[str, Any], dict[str, Any]]] = [
    ("load", "POST", "/v1/load_lora_adapter", {"json": NAMED}, {"path": "/a/1", "pinned": False}),
    (
        "load",
        "POST",
        "/v1/load_lora_adapter",
        {"json": NAMED | {"lora_path": "/a/2", "load_inplace": True, "pinned": True}},
        {"path": "/a/2", "load_inplace": True, "pinned": True},
    ),
    ("rollback", "POST", "/v1/adapters/law/rollback", {"json": {"version": 1}}, {"version": 1}),
    (
        "split",
        "POST",
        "/v1/adapters/law/split",
        {"json": {"1": 40, "2": 60}},
        {"shares": "1: 40 %, 2: 60 %"},
    ),
    ("unpin", "DELETE", "/v1/adapters/law/pin", {}, {}),
    ("pin", "POST", "/v1/adapters/law/pin", {}, {}),
    ("unload", "POST", "/v1/unload_lora_adapter", {"json": {"lora_name": "law"}}, {"force": False}),
    ("upload", "PUT", "/v1/adapters/law", {"content": WEIGHTS}, {"bytes": len(WEIGHTS)}),
    ("unload", "POST", "/unload_lora_adapter", {"json": {"lora_name": "law"}}, {}),
    ("load", "POST", "/load_lora_adapter", {"json": NAMED}, {"path": "/a/1"}),
    (
        "load_tensors",
        "POST",
        "/load_lora_adapter_from_tensors",
        {
            "json": {
                "lora_name": "law",
                "config_dict": {},
                "serialized_tensors": ENCODED,
                "load_inplace": True,
            }
        },
        {"load_inplace": True},
    ),
    ("drain", "POST", "/v1/drain", {}, {}),
    ("undrain", "DELETE", "/v1/drain", {}, {}),
    ("reset_prefix_cache", "POST", "/reset_prefix_cache", {}, {}),
]
OF_ALL = ("drain", "undrain", "reset_prefix_cache", "kv_events")


@pytest.fixture
def serving(serve: Callable[..., Any], tmp_path: Path) -> Any:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    return serve(FakeScheduler(), api_key_file=str(path))


def entries(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return what has been written since this was asked last."""
    lines = [one.message for one in caplog.records if one.name == "topwork.audit"]
    caplog.clear()
    return [json.loads(line) for line in lines]


def call(serving: Any, key: str | None, method: str, path: str, **content: Any) -> httpx.Response:
    headers = {"X-Request-Id": "job-7", "X-Forwarded-For": "192.0.2.7, 10.0.0.1"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return httpx.request(method, serving.url + path, headers=headers, timeout=PATIENCE, **content)


def test_each_call_that_changes_what_is_served_is_one_line(
    serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "topwork.audit")
    for action, method, path, content, details in CALLS:
        assert call(serving, "root-secret", method, path, **content).status_code == 200, path
        (entry,) = entries(caplog)
        assert (entry["action"], entry["status"]) == (action, 200)
        assert (entry["tenant"], entry["key"]) == ("ops", "deploys")
        assert (entry["client"], entry["request_id"]) == ("10.0.0.1", "job-7")  # by uvicorn
        assert entry["forwarded_for"] == "192.0.2.7, 10.0.0.1"
        assert entry["router"] == serving.router.router_id
        assert entry.get("adapter") == (None if action in OF_ALL else "law")
        assert details.items() <= entry.get("details", {}).items()
        assert "secret" not in json.dumps(entry) and "error" not in entry


def test_calls_that_are_refused_are_in_it_too(
    serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "topwork.audit")
    refused = [*CALLS, ("kv_events", "GET", "/v1/kv_events", {}, {})]
    for action, method, path, content, _ in refused:
        for key, status, tenant in (
            (None, 401, None),
            ("wrong-secret", 401, None),
            ("ends-secret", 401, None),
            ("user-secret", 403, "acme"),
        ):
            reply = call(serving, key, method, path, **content)
            assert reply.status_code == status
            (entry,) = entries(caplog)
            assert (entry["action"], entry["status"]) == (action, status)
            assert entry.get("tenant") == tenant
            assert entry["error"] in reply.text and "-secret" not in json.dumps(entry)
    assert serving.run(serving.backend.records()) == ()


def test_calls_that_fail_are_in_it_with_the_reason(
    serving: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "topwork.audit")
    load = "POST", "/v1/load_lora_adapter"
    for content, status, error in (
        ({"json": NAMED | {"lora_path": "/broken"}}, 400, "/broken: no adapter_config.json"),
        ({"json": {}}, 400, "lora_name: Field required"),
        ({"content": b"{"}, 400, "not JSON"),
    ):
        assert call(serving, "root-secret", *load, **content).status_code == status
        (entry,) = entries(caplog)
        assert entry["status"] == status and error in entry["error"]

    async def fail(*_: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(serving.backend, "load", fail)
    assert call(serving, "root-secret", *load, json=NAMED).status_code == 500
    (entry,) = entries(caplog)
    assert (entry["status"], entry["error"]) == (500, "KeyError")


def test_a_reader_of_kv_events_is_in_it_from_its_beginning(
    serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "topwork.audit")
    headers = {"Authorization": "Bearer root-secret"}
    with httpx.stream("GET", f"{serving.url}/v1/kv_events", headers=headers) as reply:
        assert reply.status_code == 200
        (entry,) = entries(caplog)
        assert (entry["action"], entry["status"], entry["key"]) == ("kv_events", 200, "deploys")


def test_calls_that_change_nothing_are_not_in_it(
    serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "topwork.audit")
    for path in ("/v1/models", "/v1/adapters", "/metrics", "/health", "/v1/adapters/law"):
        call(serving, "root-secret", "GET", path)
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 1}
    assert call(serving, "user-secret", "POST", "/v1/completions", json=body).status_code == 200
    assert entries(caplog) == []


def test_without_keys_calls_are_in_it_with_no_tenant(
    serve: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "topwork.audit")
    serving = serve(FakeScheduler())
    assert call(serving, None, "POST", "/v1/drain").status_code == 200
    (entry,) = entries(caplog)
    assert (entry["tenant"], entry["key"], entry["status"]) == ("", "none", 200)
