"""What a tenant may hold, over HTTP: the reason with its numbers, and who gives it back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.cluster.api.openapi.test_real_calls import ENCODED, WEIGHTS
from tests.patience import PATIENCE

KEYS = """
- {key: root-secret, tenant: ops, admin: true, adapters: "*"}
- key: acme-secret
  tenant: acme
  scopes: [adapters:load]
  adapter_prefix: acme/
  tenant_limits: {max_adapters: 2, max_pinned: 1}
"""
Call = Callable[..., httpx.Response]


@pytest.fixture
def call(serve: Callable[..., Any], tmp_path: Path) -> Call:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    serving = serve(FakeScheduler(), api_key_file=str(path))

    def call(method: str, path: str, key: str = "acme-secret", **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}", "Accept": "application/json"}
        return httpx.request(
            method, f"{serving.url}{path}", headers=headers, timeout=PATIENCE, **more
        )

    return call


def load(call: Call, name: str, **more: Any) -> httpx.Response:
    body = {"lora_name": f"acme/{name}", "lora_path": f"/a/{name}", **more}
    return call("POST", "/v1/load_lora_adapter", json=body)


def test_a_load_over_the_limit_is_403_with_the_numbers_by_whatever_route(call: Call) -> None:
    assert [load(call, name).status_code for name in "ab"] == [200, 200]
    tensors = {"lora_name": "acme/c", "config_dict": {}, "serialized_tensors": ENCODED}
    for reply in (
        load(call, "c"),
        call("PUT", "/v1/adapters/acme/c", content=WEIGHTS),
        call("POST", "/load_lora_adapter", json={"lora_name": "acme/c", "lora_path": "/a/c"}),
        call("POST", "/load_lora_adapter_from_tensors", json=tensors),
    ):
        assert reply.status_code == 403
        assert "the tenant 'acme' hold 3 adapters" in reply.text
        assert "the limit is 2, and 2 are held" in reply.text
    error = load(call, "c").json()["error"]
    assert (error["code"], error["type"]) == ("adapter_limit_exceeded", "permission_error")
    assert json.dumps(error).isprintable()
    assert load(call, "a", load_inplace=True).status_code == 200


def test_pins_have_a_limit_and_go_back(call: Call) -> None:
    assert load(call, "a", pinned=True).status_code == 200
    assert load(call, "b").status_code == 200
    reply = call("POST", "/v1/adapters/acme/b/pin")
    assert reply.status_code == 403
    assert "2 adapters that calls have pinned: the limit is 1" in reply.text
    assert call("DELETE", "/v1/adapters/acme/a/pin").status_code == 200
    assert call("POST", "/v1/adapters/acme/b/pin").status_code == 200


def test_what_an_administrator_unloads_its_owner_may_load_again(call: Call) -> None:
    assert [load(call, name).status_code for name in "abc"] == [200, 200, 403]
    body = {"lora_name": "acme/a"}
    assert call("POST", "/v1/unload_lora_adapter", "root-secret", json=body).status_code == 200
    assert load(call, "c").status_code == 200


def test_an_administrator_is_not_held_by_the_limits_of_others(call: Call) -> None:
    assert [load(call, name).status_code for name in "ab"] == [200, 200]
    body = {"lora_name": "acme/x", "lora_path": "/a/x"}
    assert call("POST", "/v1/load_lora_adapter", "root-secret", json=body).status_code == 200
