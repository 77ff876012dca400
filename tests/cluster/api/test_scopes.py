"""Tenants behind one door: what each may load, change and see, and what does not exist for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.patience import PATIENCE

KEYS = """
- {key: acme-loads, tenant: acme, scopes: ["adapters:load"], adapter_prefix: acme/,
   adapter_root: /models/acme, adapters: [shared]}
- {key: acme-reads, tenant: acme, scopes: ["adapters:read"], adapter_prefix: acme/}
- {key: acme-chats, tenant: acme, adapters: ["acme/*"]}
- {key: umbra-loads, tenant: umbra, scopes: ["adapters:load"], adapter_prefix: umbra/}
- {key: watches-it, tenant: ops, scopes: [metrics]}
- {key: drains-it, tenant: ops, scopes: [drain]}
- {key: follows-it, tenant: ops, scopes: [events]}
- {key: may-do-all, tenant: ops, admin: true, adapters: "*"}
"""
LOADED = ("acme/law", "umbra/law", "shared")


@pytest.fixture
def serving(serve: Callable[..., Any], tmp_path: Path) -> Any:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    serving = serve(FakeScheduler(), api_key_file=str(path))
    for name in LOADED:
        for version in (1, 2):
            serving.run(serving.backend.load(name, f"/models/{name}/{version}", True, False))
    return serving


def call(serving: Any, key: str | None, method: str, path: str, **content: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = serving.url + path
    return httpx.request(method, url, headers=headers, timeout=PATIENCE, **content)


def load(serving: Any, key: str, name: str, path: str, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": path, **more}
    return call(serving, key, "POST", "/v1/load_lora_adapter", json=body)


def said(reply: httpx.Response, *names: str) -> tuple[int, str]:
    """Return status and body of an answer, without the names that it repeats."""
    text = reply.text
    for name in names:
        text = text.replace(name, "NAME")
    return reply.status_code, text


CHANGES: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/unload_lora_adapter", {"json": {"lora_name": "NAME"}}),
    ("POST", "/unload_lora_adapter", {"json": {"lora_name": "NAME"}}),
    ("POST", "/v1/adapters/NAME/rollback", {}),
    ("POST", "/v1/adapters/NAME/split", {"json": {"1": 50, "2": 50}}),
    ("POST", "/v1/adapters/NAME/pin", {}),
    ("DELETE", "/v1/adapters/NAME/pin", {}),
]
READS: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "/v1/adapters/NAME", {}),
    ("GET", "/v1/models/NAME", {}),
    ("GET", "/v1/models/tiny:NAME", {}),
    ("POST", "/tokenize", {"json": {"model": "NAME", "prompt": "a"}}),
    ("POST", "/v1/completions", {"json": {"model": "NAME", "prompt": "a", "max_tokens": 1}}),
    ("POST", "/v1/completions", {"json": {"model": "tiny:NAME", "prompt": "a", "max_tokens": 1}}),
    (
        "POST",
        "/v1/completions",
        {"json": {"model": "tiny", "lora": [{"name": "NAME"}], "prompt": "a", "max_tokens": 1}},
    ),
]


def named(part: Any, name: str) -> Any:
    """Return a call about a name."""
    if isinstance(part, str):
        return part.replace("NAME", name)
    if isinstance(part, dict):
        return {key: named(value, name) for key, value in part.items()}
    return [named(one, name) for one in part] if isinstance(part, list) else part


@pytest.mark.parametrize(("method", "path", "content"), CHANGES + READS)
@pytest.mark.parametrize("key", ["acme-loads", "umbra-loads"])
def test_another_tenants_adapter_is_answered_as_one_that_does_not_exist(
    serving: Any, key: str, method: str, path: str, content: dict[str, Any]
) -> None:
    mine, other = ("acme", "umbra") if key == "acme-loads" else ("umbra", "acme")
    answers = {
        said(call(serving, key, method, named(path, name), **named(content, name)), name)
        for name in (f"{other}/law", f"{other}/no", f"{mine}/no", "nobody")
    }
    assert len(answers) == 1, answers
    assert answers.pop()[0] == 404
    records = {record.name: record for record in serving.run(serving.backend.records())}
    assert records.keys() == set(LOADED)
    assert all(record.version == 2 and not record.pinned for record in records.values())


def test_a_tenant_loads_and_changes_adapters_of_its_own(serving: Any) -> None:
    assert load(serving, "acme-loads", "acme/new", "/models/acme/new").status_code == 200
    for method, path, content in CHANGES[2:] + READS:
        for name in ("acme/new", "acme/law"):
            if name == "acme/law" or path.endswith(("/pin", "NAME")):
                reply = call(
                    serving, "acme-loads", method, named(path, name), **named(content, name)
                )
                assert reply.status_code == 200, reply.text
    body = {"lora_name": "acme/new"}
    reply = call(serving, "acme-loads", "POST", "/v1/unload_lora_adapter", json=body)
    assert reply.status_code == 200


@pytest.mark.parametrize("load_inplace", [False, True])
@pytest.mark.parametrize("name", ["umbra/law", "umbra/no", "shared", "acme", "nobody"])
def test_a_tenant_gives_no_name_but_its_own_whether_it_is_taken_or_not(
    serving: Any, name: str, load_inplace: bool
) -> None:
    more = {"load_inplace": load_inplace}
    replies = [
        load(serving, "acme-loads", name, "/models/acme/x", **more),
        call(serving, "acme-loads", "PUT", f"/v1/adapters/{name}", params=more, content=b"x"),
        call(
            serving,
            "acme-loads",
            "POST",
            "/load_lora_adapter_from_tensors",
            json={"lora_name": name, "config_dict": {}, "serialized_tensors": "", **more},
        ),
        call(
            serving,
            "acme-loads",
            "POST",
            "/load_lora_adapter",
            json={"lora_name": name, "lora_path": "/models/acme/x"},
        ),
    ]
    for reply in replies:
        assert reply.status_code == 403
        assert "begin with 'acme/'" in reply.text and name not in reply.text.replace("acme/", "")
    assert serving.run(serving.backend.record("umbra/law")).version == 2
    assert serving.backend.uploads == {}


def test_what_a_tenant_may_use_and_not_change_is_not_hidden_from_it(serving: Any) -> None:
    for method, path, content in CHANGES:
        reply = call(
            serving, "acme-loads", method, named(path, "shared"), **named(content, "shared")
        )
        assert reply.status_code == 403
    assert serving.run(serving.backend.record("shared")).version == 2


@pytest.mark.parametrize(
    "path", ["/models/umbra/law", "/models/acme/../umbra/law", "/models/acme-2", "acme", "hf://a/b"]
)
def test_a_tenant_loads_from_its_own_root_only(serving: Any, path: str) -> None:
    replies = [
        load(serving, "acme-loads", "acme/new", path),
        call(
            serving,
            "acme-loads",
            "POST",
            "/load_lora_adapter",
            json={"lora_name": "acme/new", "lora_path": path},
        ),
        call(
            serving,
            "acme-loads",
            "POST",
            "/load_lora_adapter_from_tensors",
            json={
                "lora_name": "acme/new",
                "config_dict": {},
                "serialized_tensors": "/dev/shm/someones",
            },
        ),
    ]
    for reply in replies:
        assert reply.status_code == 400 and "lies outside" in reply.text
    assert load(serving, "may-do-all", "acme/new", path).status_code == 200


@pytest.mark.parametrize(
    ("key", "adapters", "models"),
    [
        ("acme-loads", ["acme/law", "shared"], ["acme/law", "shared"]),
        ("acme-reads", ["acme/law"], []),
        ("acme-chats", ["acme/law"], ["acme/law"]),
        ("umbra-loads", ["umbra/law"], ["umbra/law"]),
        ("watches-it", [], []),
        ("may-do-all", sorted(LOADED), sorted(LOADED)),
    ],
)
def test_lists_show_what_a_key_may_see(
    serving: Any, key: str, adapters: list[str], models: list[str]
) -> None:
    listed = call(serving, key, "GET", "/v1/adapters").json()["data"]
    assert [entry["name"] for entry in listed] == adapters
    listed = call(serving, key, "GET", "/v1/models").json()["data"]
    assert [entry["id"] for entry in listed] == ["tiny", *models]


def test_who_sees_an_adapter_without_the_right_to_use_it_is_not_answered_by_it(
    serving: Any,
) -> None:
    assert call(serving, "acme-reads", "GET", "/v1/adapters/acme/law").status_code == 200
    for method, path, content in READS[1:]:
        reply = call(
            serving, "acme-reads", method, named(path, "acme/law"), **named(content, "acme/law")
        )
        assert reply.status_code == 404


SCOPED: list[tuple[str, str, str]] = [
    ("drains-it", "POST", "/v1/drain"),
    ("drains-it", "DELETE", "/v1/drain"),
    ("drains-it", "POST", "/reset_prefix_cache"),
    ("watches-it", "GET", "/metrics"),
    ("watches-it", "GET", "/docs"),
    ("watches-it", "GET", "/redoc"),
    ("watches-it", "GET", "/openapi.json"),
]


@pytest.mark.parametrize(("key", "method", "path"), SCOPED)
def test_a_scope_opens_its_calls_and_no_others(
    serving: Any, key: str, method: str, path: str
) -> None:
    assert call(serving, None, method, path).status_code == 401
    for other in ("acme-loads", "acme-chats", "follows-it", "drains-it", "watches-it"):
        if other != key:
            assert call(serving, other, method, path).status_code == 403
    for one in (key, "may-do-all"):
        assert call(serving, one, method, path).status_code == 200


def test_kv_events_have_a_scope_of_their_own(serving: Any) -> None:
    for key in ("acme-loads", "drains-it", "watches-it"):
        assert call(serving, key, "GET", "/v1/kv_events").status_code == 403
    headers = {"Authorization": "Bearer follows-it"}
    with httpx.stream("GET", f"{serving.url}/v1/kv_events", headers=headers) as reply:
        assert reply.status_code == 200


def test_probes_are_told_a_word_and_who_watches_the_reasons(serving: Any) -> None:
    serving.schedulers[0].reason = "rank 1 hangs"
    for path, word in (("/health", "unhealthy"), ("/ready", "not ready")):
        for key in (None, "wrong-secret", "acme-loads"):
            reply = call(serving, key, "GET", path)
            assert (reply.status_code, reply.json()) == (503, {"status": word})
        reply = call(serving, "watches-it", "GET", path)
        assert (reply.status_code, reply.json()["status"]) == (503, word)
        assert "rank 1 hangs" in str(reply.json()["reasons"])
    assert call(serving, None, "GET", "/ping").status_code == 503
    assert call(serving, None, "GET", "/version").status_code == 200
