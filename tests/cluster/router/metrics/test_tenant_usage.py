"""What tenants use is counted once, whoever reads it and however it ends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.errors import ErrorInfo
from cluster.router.metrics.request_metrics import OTHER, RouterMetrics
from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from cluster.tenancy.usage import Usage
from tests.cluster.conftest import Serving
from tests.end_to_end.asking import wait_for
from tests.patience import PATIENCE

HEADERS = {"Authorization": "Bearer first key"}


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump([{"key": "first key", "tenant": "acme", "scopes": ["metrics"]}]))
    return str(path)


def ask(**more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 3, "ignore_eos": True}
    return {**body, **more}


def post(serving: Serving, **more: Any) -> httpx.Response:
    url = f"{serving.url}/v1/completions"
    return httpx.post(url, json=ask(**more), headers=HEADERS, timeout=PATIENCE)


def usage(serving: Serving) -> Usage | None:
    return serving.router.metrics.counts("r").usage.get("acme")


def test_a_prompt_counts_once_for_all_its_answers(serve: Callable[..., Serving], keys: str) -> None:
    serving = serve(FakeScheduler(lambda _: Script(num_cached_tokens=1)), api_key_file=keys)
    assert post(serving, n=2).status_code == 200
    assert usage(serving) == Usage(2, 3, 1, 6)
    text = httpx.get(f"{serving.url}/metrics", headers=HEADERS, timeout=PATIENCE).text
    assert 'topwork_tenant_generation_tokens_total{router="' in text
    assert ',tenant="acme"} 6.0' in text


def test_an_answer_that_is_broken_off_counts_as_far_as_it_came(
    serve: Callable[..., Serving], keys: str, saying: Callable[..., tuple[int, ...]]
) -> None:
    script = Script(saying("abc"), pauses_after=1)
    serving = serve(FakeScheduler(lambda _: script), api_key_file=keys)
    url = f"{serving.url}/v1/completions"
    with httpx.stream("POST", url, json=ask(stream=True), headers=HEADERS, timeout=PATIENCE) as r:
        next(r.iter_lines())
    wait_for(lambda: usage(serving) == Usage(1, 4, 0, 1))


def test_a_call_that_no_scheduler_answers_has_used_nothing(
    serve: Callable[..., Serving], keys: str
) -> None:
    full = Script((), error=ErrorInfo("Overloaded", "full"))
    serving = serve(FakeScheduler(lambda _: full), api_key_file=keys)
    assert post(serving).status_code == 429
    assert usage(serving) in (None, Usage())


def test_without_keys_there_are_no_tenants(serve: Callable[..., Serving]) -> None:
    serving = serve(FakeScheduler())
    assert post(serving).status_code == 200
    assert serving.router.metrics.counts("r").usage == {}


def test_tenants_over_the_cap_share_a_label_and_are_told_apart_for_the_file() -> None:
    metrics = RouterMetrics("tiny", 2)
    for number in range(4):
        metrics.used(f"tenant {number}", Usage(1, 2, 3, 4))
    counted = metrics.counts("r")
    assert dict(counted.counters["tenant_requests"]) == {
        ("tenant 0",): 1,
        ("tenant 1",): 1,
        (OTHER,): 2,
    }
    assert counted.usage == {f"tenant {number}": Usage(1, 2, 3, 4) for number in range(4)}
