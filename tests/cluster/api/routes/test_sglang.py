"""Loading and unloading adapters as SGLang's clients do it, with fake schedulers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.api.routes.sglang import MAX_SHOWN
from cluster.errors import Unavailable
from cluster.router.testing.fake_scheduler import FakeScheduler


@pytest.fixture
def serving(serve: Callable[..., Any]) -> Any:
    """Return a server without adapters."""
    return serve(FakeScheduler())


def post(serving: Any, what: str, key: str = "none", **body: Any) -> httpx.Response:
    return httpx.post(
        f"{serving.url}/{what}_lora_adapter", json=body, headers={"Authorization": f"Bearer {key}"}
    )


def load(serving: Any, name: str, path: str = "/a/1", **more: Any) -> httpx.Response:
    return post(serving, "load", lora_name=name, lora_path=path, **more)


def names(serving: Any) -> list[str]:
    return [entry["name"] for entry in httpx.get(f"{serving.url}/v1/adapters").json()["data"]]


def versions(serving: Any, name: str) -> Any:
    return httpx.get(f"{serving.url}/v1/adapters/{name}").json()["versions"]


def refused(reply: httpx.Response, status: int, reason: str) -> None:
    assert reply.status_code == status
    body = reply.json()
    assert body.keys() == {"success", "error_message", "loaded_adapters"}
    assert (body["success"], body["loaded_adapters"]) == (False, None)
    assert reason in body["error_message"]


def test_an_adapter_is_loaded_used_and_unloaded(serving: Any) -> None:
    first = load(serving, "law")
    assert (first.status_code, first.json()) == (
        200,
        {"success": True, "error_message": "", "loaded_adapters": {"law": "/a/1"}},
    )
    second = load(serving, "art", "/a/2", pinned=True)
    assert second.json()["loaded_adapters"] == {"art": "/a/2", "law": "/a/1"}
    serving.client().completions.create(model="law", prompt=[5], max_tokens=1)
    digest = serving.schedulers[0].submitted[0].adapter
    entries = httpx.get(f"{serving.url}/v1/adapters").json()["data"]
    assert [(entry["name"], entry["pinned"]) for entry in entries] == [
        ("art", True),
        ("law", False),
    ]
    gone = post(serving, "unload", lora_name="law")
    assert (gone.status_code, gone.json()) == (
        200,
        {"success": True, "error_message": "", "loaded_adapters": {"art": "/a/2"}},
    )
    assert serving.schedulers[0].unloaded == [digest]
    assert serving.backend.forced == []


def test_null_fields_of_sglangs_own_clients_ask_for_nothing(serving: Any) -> None:
    own: Any = {"lora_id": None, "rid": None, "http_worker_ipc": None}
    assert load(serving, "law", added_tokens_config=None, **own).status_code == 200
    assert post(serving, "unload", lora_name="law", **own).status_code == 200


def test_a_failure_has_our_status_and_reason_in_sglangs_shape(serving: Any) -> None:
    load(serving, "law")
    refused(load(serving, "law"), 400, "law")
    refused(load(serving, "law", "/a/2"), 400, "law")
    refused(load(serving, "c", "/a/broken"), 400, "no adapter_config.json")
    refused(load(serving, "tiny"), 400, "is the name of the base model")
    refused(load(serving, "has space"), 400, "lora_name: ")
    refused(load(serving, "c", "/a\x00b"), 400, "lora_path: ")
    refused(load(serving, "c", pinned="yes"), 400, "pinned: ")
    refused(load(serving, "c", added_tokens_config={"<x>": 9}), 400, "added_tokens_config is not")
    refused(load(serving, "c", lora_id="abc"), 400, "lora_id is not supported")
    refused(load(serving, "c", load_inplace=True), 400, "load_inplace is not a known parameter")
    refused(post(serving, "load"), 400, "lora_name: Field required")
    refused(post(serving, "unload", lora_name="nobody"), 404, "nobody")
    refused(post(serving, "unload", lora_name="law", lora_id="abc"), 400, "lora_id is not")
    refused(post(serving, "unload", lora_name="law", force=True), 400, "force is not a known")
    refused(httpx.post(f"{serving.url}/load_lora_adapter", content=b"{"), 400, "not JSON")
    assert names(serving) == ["law"]
    assert [v["version"] for v in versions(serving, "law")] == [1]


def test_only_an_admin_loads_and_unloads(serve: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(
        "- {key: alice-secret, tenant: alice, adapters: [law]}\n"
        "- {key: admin-secret, tenant: ops, adapters: [law], admin: true}\n"
    )
    serving = serve(FakeScheduler(), api_key_file=str(tmp_path / "keys.yaml"))
    serving.run(serving.backend.load("secret", "/a/9", False, False))
    body = {"lora_name": "law", "lora_path": "/a/1"}
    unknown = post(serving, "load", "wrong-secret", **body)
    refused(unknown, 401, "unknown API key")
    assert unknown.headers["WWW-Authenticate"] == "Bearer"
    refused(post(serving, "load", "alice-secret", **body), 403, "admin right")
    refused(post(serving, "unload", "alice-secret", lora_name="secret"), 403, "admin right")
    reply = post(serving, "load", "admin-secret", **body)
    assert reply.json()["loaded_adapters"] == {"law": "/a/1", "secret": "/a/9"}


def test_an_answer_shows_the_new_adapter_and_a_thousand_at_most(serving: Any) -> None:
    for number in range(MAX_SHOWN + 5):
        serving.run(serving.backend.load(f"a{number:04d}", "/a/1", False, False))
    shown = load(serving, "zoo", "/a/2").json()["loaded_adapters"]
    assert len(shown) == MAX_SHOWN
    assert list(shown)[:2] == ["zoo", "a0000"]
    left = post(serving, "unload", lora_name="zoo").json()["loaded_adapters"]
    assert len(left) == MAX_SHOWN and "zoo" not in left


def test_a_catalogue_that_cannot_be_had_makes_no_failure_of_what_was_done(serving: Any) -> None:
    async def down() -> None:
        raise Unavailable("the adapter pool is down", retry_after=1)

    serving.backend.records = down
    reply = load(serving, "law")
    assert (reply.status_code, reply.json()["success"]) == (200, True)
    assert reply.json()["loaded_adapters"] is None


def test_a_pool_that_is_down_says_when_to_come_back(serving: Any) -> None:
    async def down(*_: Any) -> None:
        raise Unavailable("the adapter pool is down", retry_after=7)

    serving.backend.load = down
    reply = load(serving, "law")
    refused(reply, 503, "the adapter pool is down")
    assert reply.headers["Retry-After"] == "7"
