"""Keys in the headers of calls, and what becomes of callers when the file of keys changes."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from cluster.api.auth import presented_key
from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from tests.cluster.conftest import Serving
from tests.patience import PATIENCE

ALICE, BOB = "{key: alice-secret, tenant: alice}", "{key: bobs-secret, tenant: bob}"
ENDED = "{key: ended-secret, tenant: alice, expires: 2001-01-01T00:00:00Z}"
SECONDS = 5.0  # after which a key that was taken away may open nothing


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic top-secret-1", "top-secret-1"]
)
def test_a_header_without_a_key_is_refused(header: str | None) -> None:
    sent = {} if header is None else {"authorization": header}
    assert presented_key(Headers(sent)) is None
    assert presented_key(Headers({**sent, "x-api-key": "other"})) == (
        "other" if header is None else None
    )
    assert presented_key(Headers({"authorization": "bearer top-secret-1"})) == "top-secret-1"


def models(serving: Any, key: str, header: str = "Authorization") -> httpx.Response:
    value = f"Bearer {key}" if header == "Authorization" else key
    return httpx.get(f"{serving.url}/v1/models", headers={header: value}, timeout=PATIENCE)


def test_a_key_that_is_unknown_or_over_is_told_so(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"[{ALICE}, {ENDED}]")
    serving = serve(FakeScheduler(), api_key_file=str(path))
    for header in ("Authorization", "X-Api-Key"):
        assert models(serving, "alice-secret", header).status_code == 200
        for key, code in (
            ("ended-secret", "expired_api_key"),
            ("nobodys-secret", "invalid_api_key"),
        ):
            reply = models(serving, key, header)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, code)
            assert reply.headers["WWW-Authenticate"] == "Bearer"
            assert key not in reply.text


def test_a_key_that_is_taken_away_is_refused_at_every_router_while_its_streams_go_on(
    serve: Callable[..., Any], saying: Callable[..., tuple[int, ...]], tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"[{ALICE}, {BOB}]")
    script = Script(saying("the lazy dog"), pauses_after=1)
    routers = [serve(FakeScheduler(lambda _: script), api_key_file=str(path)) for _ in range(2)]
    body = {"model": "tiny", "prompt": "hello", "stream": True}
    has_begun = threading.Semaphore(0)

    def stream(serving: Any) -> str:
        url, headers = f"{serving.url}/v1/completions", {"Authorization": "Bearer alice-secret"}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE) as reply:
            parts = reply.iter_text()
            said = next(parts)
            has_begun.release()
            return said + "".join(parts)

    with ThreadPoolExecutor(4) as threads:
        streams = [threads.submit(stream, serving) for serving in routers * 2]
        assert all(has_begun.acquire(timeout=PATIENCE) for _ in streams)
        path.write_text(f"[{BOB}]")
        begun, waiting = time.monotonic(), list(routers)
        while waiting:
            assert time.monotonic() - begun < SECONDS
            waiting = [one for one in waiting if models(one, "alice-secret").status_code != 401]
        for one in routers:
            one.loop.call_soon_threadsafe(one.schedulers[0].resume)
        assert all(" dog" in one.result() and "[DONE]" in one.result() for one in streams)
    assert all(models(serving, "bobs-secret").status_code == 200 for serving in routers)


def test_metrics_tell_of_a_file_that_broke_and_when_the_keys_that_count_were_read(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    def samples() -> dict[str, float]:
        text = httpx.get(f"{serving.url}/metrics", headers=headers, timeout=PATIENCE).text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if "api_key_file" in line]
        return {name.partition("{")[0]: float(v) for name, v in lines if name[0] != "#"}

    path, headers = tmp_path / "keys.yaml", {"Authorization": "Bearer alice-secret"}
    path.write_text("[{key: alice-secret, tenant: alice, scopes: [metrics]}]")
    begun = time.time()
    serving = serve(FakeScheduler(), api_key_file=str(path))
    errors, loaded = "topwork_api_key_file_errors_total", "topwork_api_key_file_loaded_timestamp"
    before = samples()
    assert before[errors] == 0 and begun <= before[f"{loaded}_seconds"] <= time.time()
    path.write_text("[{key: ")
    deadline = time.monotonic() + PATIENCE
    while samples()[errors] < 1:
        assert time.monotonic() < deadline
    assert samples()[f"{loaded}_seconds"] == before[f"{loaded}_seconds"]


def test_without_a_file_of_keys_metrics_tell_of_no_time(serve: Callable[..., Any]) -> None:
    text = httpx.get(f"{serve(FakeScheduler()).url}/metrics", timeout=PATIENCE).text
    assert "\ntopwork_api_key_file_loaded_timestamp_seconds{" not in text
    assert "\ntopwork_api_key_file_errors_total{" in text


def test_with_anonymous_nobody_changes_what_is_served_and_all_else_is_open(
    serve: Callable[..., Any],
) -> None:
    serving = serve(FakeScheduler(), anonymous=True)
    serving.run(serving.backend.load("law", "/a/1", False, False))
    with_key = {"Authorization": "Bearer of-no-meaning"}
    for method, path in (
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/load_lora_adapter"),
        ("POST", "/unload_lora_adapter"),
        ("POST", "/load_lora_adapter_from_tensors"),
        ("PUT", "/v1/adapters/new"),
        ("POST", "/v1/adapters/law/rollback"),
        ("POST", "/v1/adapters/law/split"),
        ("POST", "/v1/adapters/law/pin"),
        ("DELETE", "/v1/adapters/law/pin"),
        ("POST", "/v1/drain"),
        ("DELETE", "/v1/drain"),
        ("POST", "/reset_prefix_cache"),
        ("GET", "/v1/kv_events"),
    ):
        for headers in ({}, with_key):
            reply = httpx.request(method, serving.url + path, headers=headers, timeout=PATIENCE)
            assert reply.status_code == 403, path
    for path in ("/metrics", "/health", "/ready", "/docs", "/openapi.json", "/v1/adapters/law"):
        assert httpx.get(serving.url + path, timeout=PATIENCE).status_code == 200, path
    body = {"model": "law", "prompt": "hello", "max_tokens": 1}
    assert (
        httpx.post(f"{serving.url}/v1/completions", json=body, timeout=PATIENCE).status_code == 200
    )
    document = httpx.get(f"{serving.url}/openapi.json", timeout=PATIENCE).json()
    assert {"401", "403"} & {*document["paths"]["/v1/drain"]["post"]["responses"]} == {"403"}


def test_tenants_share_no_cached_prefix_unless_their_keys_name_one_group(
    serve: Callable[..., Serving], tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(
        "- {key: top-secret-1, tenant: a}\n- {key: top-secret-2, tenant: b}\n"
        "- {key: top-secret-3, tenant: c, cache_group: shared}\n"
        "- {key: top-secret-4, tenant: d, cache_group: shared}\n"
    )
    serving = serve(FakeScheduler(), api_key_file=str(path))
    salts: list[str] = []
    for number in range(1, 5):
        for call, body in (
            ("completions", {"prompt": "hello", "max_tokens": 1}),
            ("embeddings", {"input": "hello"}),
        ):
            headers = {"Authorization": f"Bearer top-secret-{number}"}
            sent = {"model": "tiny", "cache_salt": "s", **body}
            httpx.post(f"{serving.url}/v1/{call}", json=sent, headers=headers, timeout=PATIENCE)
            salts.append(serving.schedulers[0].submitted[-1].cache_salt)
    of_key = [salts[i : i + 2] for i in range(0, 8, 2)]
    assert all(one == other for one, other in of_key)
    assert len({one for one, _ in of_key}) == 3 and of_key[2] == of_key[3]
