"""When the times of a call begin."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler


@pytest.mark.parametrize("name", ["time_to_first_token_seconds", "e2e_request_latency_seconds"])
def test_a_latency_counts_from_the_arrival_of_the_call(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    serving = serve(FakeScheduler())
    serving.run(serving.backend.load("json", "/a/json", False, False))
    now = 0.0

    def takes(seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            now += seconds
            return work(*args, **kwargs)

        return slow

    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("cluster.api.http.time", clock)
    monkeypatch.setattr("cluster.router.metrics.request_metrics.time", clock)
    assert not serving.router.tokenizer.renders_tools  # it is found out once
    serving.backend.resolve = takes(100.0, serving.backend.resolve)
    serving.router.tokenizer.render = takes(10.0, serving.router.tokenizer.render)
    serving.router.tokenizer.encode = takes(1.0, serving.router.tokenizer.encode)
    body = {"model": "json", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    reply = httpx.post(f"{serving.url}/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert serving.router.metrics.counts("r").histograms[name].total == 111.0
