"""POST /invocations answers what the route answers that a body is for."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from tests.cluster.conftest import Serving
from tests.patience import PATIENCE

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


@pytest.fixture
def serving(serve: Callable[..., Serving], saying: Callable[..., tuple[int, ...]]) -> Serving:
    return serve(FakeScheduler(lambda _: Script(saying("fox jumps"))))


def post(serving: Serving, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(serving.url + path, json={"model": "tiny"} | body, timeout=PATIENCE)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/embeddings", {"input": "hello"}),
        ("/v1/embeddings", CHAT | {"encoding_format": "float"}),
    ],
)
def test_a_body_is_answered_as_by_the_route_that_it_is_for(
    serving: Serving, path: str, body: dict[str, Any]
) -> None:
    there = post(serving, path, body)
    here = post(serving, "/invocations", body)
    assert (here.status_code, here.headers["content-type"]) == (
        there.status_code,
        there.headers["content-type"],
    )
    if body.get("stream"):
        assert here.text.count("data: ") == there.text.count("data: ") > 2
        return
    assert here.json().keys() == there.json().keys()
    for name in {"choices", "data", "usage", "error"} & here.json().keys():
        assert here.json()[name] == there.json()[name]


@pytest.mark.parametrize("content", [b"{}", b"[]", b"{", b'{"a":' + b"[" * 100_000])
def test_a_body_that_is_for_no_route_is_refused(serving: Serving, content: bytes) -> None:
    reply = httpx.post(f"{serving.url}/invocations", content=content, timeout=PATIENCE)
    assert reply.status_code == 400
    assert "the body" in reply.json()["error"]["message"]


def test_a_call_whose_client_goes_away_ends(serve: Callable[..., Serving]) -> None:
    fake = FakeScheduler(lambda _: Script(is_silent=True))
    serving = serve(fake)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{serving.url}/invocations", json={"model": "tiny", "prompt": "a"}, timeout=1)
    serving.run(fake.wait_until(lambda fake: len(fake.aborted) == 1))
    assert serving.router.num_in_flight == 0
