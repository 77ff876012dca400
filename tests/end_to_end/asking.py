"""How tests ask what serves: over HTTP, and with patience."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from tests.patience import PATIENCE


def wait_for(holds: Callable[[], bool], told: Callable[[], object] = lambda: "") -> None:
    """Wait for something that must come by itself; `told` says more if it does not."""
    gate = threading.Event()
    for _ in range(int(PATIENCE / 0.1)):
        if holds():
            return
        gate.wait(0.1)
    raise AssertionError(f"it did not come: {told()}")


class Endpoint:
    """Something that answers over HTTP at an address."""

    url: str
    headers: Mapping[str, str] = {}  # of every call

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers=dict(self.headers), timeout=PATIENCE)

    def post(
        self, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        sent = {**self.headers, **(headers or {})}
        return httpx.post(f"{self.url}{path}", json=body, headers=sent, timeout=PATIENCE)

    def is_healthy(self) -> bool:
        return self.get("/health").status_code == 200

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=dict(self.headers), timeout=PATIENCE)


def complete(
    server: Endpoint, model: str, prompt: list[int], n: int, **extra: Any
) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": n,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **extra,
    }
    reply = server.post("/v1/completions", body)
    assert reply.status_code == 200, reply.text
    result: dict[str, Any] = reply.json()
    return result


def tokens(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def cached(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count
