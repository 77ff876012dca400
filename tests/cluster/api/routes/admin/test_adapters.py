"""Versions, listings and unloading over HTTP, with a catalogue in memory and fake schedulers."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler

JSON = {"Accept": "application/json"}


@pytest.fixture
def serving(serve: Callable[..., Any]) -> Any:
    """Return a server without adapters."""
    return serve(FakeScheduler(), FakeScheduler(replica="1"))


def load(serving: Any, name: str, path: str = "/adapters/one", **more: Any) -> httpx.Response:
    return httpx.post(
        f"{serving.url}/v1/load_lora_adapter",
        json={"lora_name": name, "lora_path": path, "load_inplace": True} | more,
    )


def post(serving: Any, route: str, body: Any = None, **more: Any) -> httpx.Response:
    return httpx.post(f"{serving.url}/v1/{route}", json=body, **more)


def digest(path: str) -> str:
    return sha256(path.encode()).hexdigest()


def used(serving: Any, name: str, request_id: str) -> str:
    """Send a request and return the digest that reached a scheduler."""
    before = [len(fake.submitted) for fake in serving.schedulers]
    reply = httpx.post(
        f"{serving.url}/v1/completions",
        json={"model": name, "prompt": [5], "max_tokens": 1},
        headers={"X-Request-Id": request_id},
    )
    assert reply.status_code == 200, reply.text
    (request,) = [
        r for fake, n in zip(serving.schedulers, before, strict=True) for r in fake.submitted[n:]
    ]
    return str(request.adapter)


def test_versions_are_listed_with_digest_path_share_and_since(serving: Any) -> None:
    for path in ("/a/1", "/a/2", "/a/1"):
        load(serving, "law", path)
    entry = httpx.get(f"{serving.url}/v1/adapters/law").json()
    assert entry == httpx.get(f"{serving.url}/v1/adapters").json()["data"][0]
    assert (entry["version"], entry["digest"], entry["watched"]) == (3, digest("/a/1"), False)
    assert [
        (v["version"], v["digest"], v["path"], v["share"], v["since"], v["tier"], v["leases"])
        for v in entry["versions"]
    ] == [
        (1, digest("/a/1"), "/a/1", 0, 1, "host", 0),
        (2, digest("/a/2"), "/a/2", 0, 2, "host", 0),
        (3, digest("/a/1"), "/a/1", 100, 1, "host", 0),
    ]


def test_a_rollback_answers_with_what_the_name_stands_for_now(serving: Any) -> None:
    for path in ("/a/1", "/a/2", "/a/3"):
        load(serving, "my-org/law", path)
    for body, version in ((None, 2), ({}, 1), ({"version": 3}, 3), ({"version": None}, 2)):
        reply = post(serving, "adapters/my-org/law/rollback", body)
        assert (reply.status_code, reply.json()["version"]) == (200, version)
        assert used(serving, "my-org/law", "x") == digest(f"/a/{version}")


def test_a_rollback_that_cannot_be_is_a_conflict_with_the_reason(serving: Any) -> None:
    load(serving, "law", "/a/lost")
    load(serving, "law", "/a/2")
    for body, reason in ((None, "cannot be had"), ({"version": 9}, "has no version 9")):
        reply = post(serving, "adapters/law/rollback", body)
        assert reply.status_code == 409
        assert reason in reply.json()["error"]["message"]
        assert reply.json()["error"]["param"] == "version"
    assert used(serving, "law", "x") == digest("/a/2")
    assert post(serving, "adapters/nobody/rollback").status_code == 404


def test_a_split_is_kept_by_request_id(serving: Any) -> None:
    for path in ("/a/1", "/a/2"):
        load(serving, "law", path)
    reply = post(serving, "adapters/law/split", {"1": 50, "2": 50})
    assert reply.status_code == 200
    assert [version["share"] for version in reply.json()["versions"]] == [50, 50]
    resolved = {}
    for number in range(40):
        resolved[number] = serving.run(serving.backend.resolve("law", f"r{number}")).digest
    assert set(resolved.values()) == {digest("/a/1"), digest("/a/2")}
    assert {n: used(serving, "law", f"r{n}") for n in resolved} == resolved


def test_a_pin_changes_neither_versions_nor_shares_and_can_be_taken_back(serving: Any) -> None:
    for path in ("/a/1", "/a/2"):
        load(serving, "my-org/law", path)
    before = post(serving, "adapters/my-org/law/split", {"1": 30, "2": 70}).json()
    route = f"{serving.url}/v1/adapters/my-org/law/pin"
    for call, is_pinned in ((httpx.post, True), (httpx.post, True), (httpx.delete, False)):
        reply = call(route)
        assert (reply.status_code, reply.json()) == (200, before | {"pinned": is_pinned})
        assert httpx.get(f"{serving.url}/v1/adapters/my-org/law").json() == reply.json()


def test_one_pin_too_many_is_refused_and_changes_nothing(serving: Any) -> None:
    for number in range(4):
        load(serving, f"a{number}", f"/a/{number}")
    replies = [post(serving, f"adapters/a{number}/pin") for number in range(4)]
    assert [reply.status_code for reply in replies] == [200, 200, 200, 400]
    assert "3 adapters are pinned already" in replies[3].json()["error"]["message"]
    listed = httpx.get(f"{serving.url}/v1/adapters").json()["data"]
    assert [entry["pinned"] for entry in listed] == [True, True, True, False]
    httpx.delete(f"{serving.url}/v1/adapters/a1/pin")
    assert post(serving, "adapters/a3/pin").status_code == 200


@pytest.mark.parametrize(
    ("route", "body", "status"),
    [
        ("adapters/law/pin", {"pinned": False}, 400),
        ("adapters/law/pin", [], 400),
        ("adapters/nobody/pin", None, 404),
        ("adapters/law/split", {"1": 50, "2": 49}, 400),
        ("adapters/law/split", {"1": 101, "2": -1}, 400),
        ("adapters/law/split", {"one": 100}, 400),
        ("adapters/law/split", {"1": 50.5, "2": 49.5}, 400),
        ("adapters/law/split", {"01": 100}, 400),
        ("adapters/law/split", {"1": True, "2": 99}, 400),
        ("adapters/law/split", {}, 400),
        ("adapters/law/split", [100], 400),
        ("adapters/law/split", {str(n): 1 for n in range(1, 101)}, 400),
        ("adapters/law/split", {"7": 100}, 409),
        ("adapters/nobody/split", {"1": 100}, 404),
        ("adapters/law/rollback", {"version": 0}, 400),
        ("adapters/law/rollback", {"version": "1"}, 400),
        ("adapters/law/rollback", {"versoin": 1}, 400),
        ("adapters/law/rollback", [], 400),
        ("load_lora_adapter", {"lora_name": "x", "lora_path": "/a", "pinned": 1}, 400),
        ("unload_lora_adapter", {"lora_name": "law", "force": "yes"}, 400),
    ],
)
def test_bad_bodies_have_their_status_and_change_nothing(
    serving: Any, route: str, body: Any, status: int
) -> None:
    load(serving, "law", "/a/1")
    load(serving, "law", "/a/2")
    before = httpx.get(f"{serving.url}/v1/adapters").json()
    reply = post(serving, route, body)
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["message"]
    assert httpx.get(f"{serving.url}/v1/adapters").json() == before


def test_pinning_over_capacity_is_refused_with_the_numbers(serving: Any) -> None:
    for number in range(3):
        assert load(serving, f"a{number}", f"/a/{number}", pinned=True).status_code == 200
    reply = load(serving, "one too many", "/a/9", pinned=True)
    assert reply.status_code == 400
    reply = load(serving, "too-many", "/a/9", pinned=True)
    assert reply.status_code == 400
    assert "3 adapters are pinned already, and 3 may be" in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == "pinned"


def test_an_unload_says_what_was_freed_to_those_who_ask_for_json(serving: Any) -> None:
    load(serving, "law", "/a/1")
    load(serving, "law", "/a/2")
    load(serving, "right", "/a/2")
    reply = post(serving, "unload_lora_adapter", {"lora_name": "law"}, headers=JSON).json()
    assert (reply["name"], reply["versions"], reply["shared"]) == ("law", [1, 2], [digest("/a/2")])
    (freed,) = reply["freed"]
    assert (freed["digest"], freed["forgotten"]) == (digest("/a/1"), True)
    assert freed["host_bytes"] == 1024
    assert [fake.unloaded for fake in serving.schedulers] == [[digest("/a/1")]] * 2
    text = post(serving, "unload_lora_adapter", {"lora_name": "right"})
    assert text.text == "Success: LoRA adapter 'right' removed successfully."
    loaded = httpx.post(
        f"{serving.url}/v1/load_lora_adapter",
        json={"lora_name": "law", "lora_path": "/a/3"},
        headers=JSON,
    )
    assert (loaded.json()["name"], loaded.json()["version"]) == ("law", 3)


@pytest.mark.parametrize(
    ("query", "body", "forced"),
    [
        ("", {}, False),
        ("?force=true", {}, True),
        ("", {"force": True}, True),
        ("?force=0", {}, False),
    ],
)
def test_force_is_said_in_the_query_or_in_the_body(
    serving: Any, query: str, body: dict[str, bool], forced: bool
) -> None:
    load(serving, "law")
    reply = post(serving, f"unload_lora_adapter{query}", {"lora_name": "law"} | body)
    assert reply.status_code == 200
    assert serving.backend.forced == (["law"] if forced else [])


def test_thousands_are_listed_in_pages(serving: Any) -> None:
    names = sorted(f"a{number:04d}" for number in range(2500))
    for name in names:
        serving.run(serving.backend.load(name, "/adapters/one", False, False))
    for route, first in (("adapters", []), ("models", ["tiny"])):
        key = "name" if route == "adapters" else "id"
        listed, after = [], ""
        while True:
            page = httpx.get(f"{serving.url}/v1/{route}?limit=1000&after={after}").json()["data"]
            if not page:
                break
            listed += [entry[key] for entry in page]
            after = listed[-1]
        assert listed == first + names
        whole = httpx.get(f"{serving.url}/v1/{route}").json()["data"]
        assert [entry[key] for entry in whole] == first + names
    page = httpx.get(f"{serving.url}/v1/adapters?limit=1&after=a2498").json()
    assert (page["has_more"], page["last_id"]) == (False, "a2499")
    assert httpx.get(f"{serving.url}/v1/adapters?limit=1&after=a2497").json()["has_more"] is True
    assert httpx.get(f"{serving.url}/v1/adapters?after=zzz").json()["last_id"] is None


@pytest.mark.parametrize("limit", ["0", "-1", "x", "1e3", "10001", "٣", ""])
def test_a_limit_that_is_no_number_in_range_is_refused(serving: Any, limit: str) -> None:
    for route in ("adapters", "models"):
        reply = httpx.get(f"{serving.url}/v1/{route}", params={"limit": limit})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "limit"


KEYS = """
- {key: alice-secret, tenant: alice, adapters: [law]}
- {key: root-secret, tenant: ops, adapters: "*", admin: true}
"""


def test_versions_are_changed_by_admins_and_seen_by_those_who_may_use_the_name(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "keys.yaml").write_text(KEYS)
    serving = serve(FakeScheduler(), api_key_file=str(tmp_path / "keys.yaml"))
    for name in ("law", "secret"):
        for path in ("/a/1", "/a/2"):
            serving.run(serving.backend.load(name, path, True, False))

    def status(key: str | None, method: str, route: str, body: Any = None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        url = f"{serving.url}/v1/{route}"
        return httpx.request(method, url, json=body, headers=headers).status_code

    for route, body in (("rollback", None), ("split", {"1": 100})):
        assert status(None, "POST", f"adapters/law/{route}", body) == 401
        assert status("alice-secret", "POST", f"adapters/law/{route}", body) == 403
        assert status("root-secret", "POST", f"adapters/law/{route}", body) == 200
    assert status("alice-secret", "GET", "adapters/law") == 200
    assert status("alice-secret", "GET", "adapters/secret") == 404
    assert status("root-secret", "GET", "adapters/nobody") == 404
