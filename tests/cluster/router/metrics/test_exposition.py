"""What routers count of calls, and what any of them shows of all."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.router.metrics import aggregation
from cluster.router.testing.fake_scheduler import FakeScheduler, Script

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(serving: Any) -> Samples:
    """Return all samples of a router's page by name and labels."""
    text = httpx.get(f"{serving.url}/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def values(samples: Samples, name: str, **labels: str) -> list[float]:
    """Return the values of the series of a name that have these labels, among others."""
    return [
        value
        for (series, having), value in samples.items()
        if series == f"topwork_{name}" and labels.items() <= dict(having).items()
    ]


def complete(serving: Any, model: str = "tiny", **more: Any) -> Any:
    return serving.client().completions.create(model=model, prompt=[5, 6], max_tokens=2, **more)


def load(serving: Any, name: str) -> None:
    body = {"lora_name": name, "lora_path": f"/adapters/{name}"}
    assert httpx.post(f"{serving.url}/v1/load_lora_adapter", json=body).status_code == 200


@pytest.fixture
def pair(serve: Callable[..., Any]) -> tuple[Any, Any]:
    """Return two routers of one cluster: they share catalogue and hub."""
    one, two = serve(FakeScheduler()), serve(FakeScheduler())
    two.backend.share(one.backend)
    return one, two


def test_each_router_shows_the_counts_of_both(pair: tuple[Any, Any]) -> None:
    one, two = pair
    for serving in (one, two, two):
        complete(serving)
    scrape(one)  # enters its counts, which the next scrape finds
    for serving in (two, one):
        seen = scrape(serving)
        assert sorted(values(seen, "requests_total")) == [1, 2]
        assert values(seen, "router_up") == [1, 1]
        assert sorted(values(seen, "time_to_first_token_seconds_count")) == [1, 2]


def test_no_scrape_shows_less_than_the_one_before(pair: tuple[Any, Any]) -> None:
    latest: Samples = {}
    for number in range(12):
        complete(pair[number // 2 % 2])
        seen = scrape(pair[number % 2])
        counters = {
            key: value
            for key, value in seen.items()
            if key[0].endswith(("_total", "_count")) and "router" in dict(key[1])
        }
        fallen = {key for key, value in counters.items() if value < latest.get(key, 0.0)}
        assert not fallen
        latest |= counters
    assert sum(value for key, value in latest.items() if key[0] == "topwork_requests_total") >= 11


def test_a_router_that_ends_in_order_leaves_its_last_counts(pair: tuple[Any, Any]) -> None:
    one, two = pair
    complete(two)
    two.run(two.router.close())
    seen = scrape(one)
    gone = two.router.router_id
    assert values(seen, "requests_total", router=gone) == [1]
    assert values(seen, "router_up") == [1]
    assert not values(seen, "router_inflight", router=gone)


def test_a_router_that_dies_is_shown_as_down(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    complete(two)
    scrape(two)
    monkeypatch.setattr("cluster.router.metrics.exposition.SILENCE", -1.0)
    seen = scrape(one)
    assert values(seen, "router_up", router=two.router.router_id) == [0]
    assert values(seen, "requests_total", router=two.router.router_id) == [1]


def test_counts_are_entered_without_a_scrape(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregation, "INTERVAL", 0.01)
    one, two = serve(FakeScheduler()), serve(FakeScheduler())
    two.backend.share(one.backend)
    complete(two)
    router = two.router.router_id

    async def entered() -> None:
        while not any(
            report.counts.router == router and report.counts.counters["requests"]
            for report in one.backend.hub.reports()
        ):
            await asyncio.sleep(0.01)

    one.run(entered())
    assert values(scrape(one), "requests_total", router=router) == [1]


def test_without_the_pool_a_router_shows_its_own_counts(pair: tuple[Any, Any]) -> None:
    one, two = pair
    for serving in pair:
        complete(serving)
        scrape(serving)
    one.backend.is_down = True
    seen = scrape(one)
    assert values(seen, "requests_total") == [1]
    assert values(seen, "adapter_pool_up") == [0]
    one.backend.is_down = False
    assert values(scrape(one), "requests_total") == [1, 1]


def test_an_adapter_unloaded_by_one_router_ends_in_the_series_of_all(pair: tuple[Any, Any]) -> None:
    one, two = pair
    load(one, "sql")
    for serving in pair:
        complete(serving, "sql")
        complete(serving)
        scrape(serving)
    httpx.post(f"{one.url}/v1/unload_lora_adapter", json={"lora_name": "sql"})
    seen = scrape(one)  # the other one has not heard of it
    assert not values(seen, "requests_total", adapter="sql")
    assert values(seen, "requests_total", adapter="tiny") == [1, 1]
    scrape(two)
    assert two.router.metrics.counts("x").adapters == {}


def test_a_sum_goes_with_any_adapter_in_it(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    for name in ("a", "b", "a+b"):
        load(serving, name)
    complete(serving, extra_body={"lora": [{"name": "a"}, {"name": "b"}]})
    complete(serving, "a+b")  # an adapter of that name: the two share a label
    complete(serving, "b")
    assert values(scrape(serving), "requests_total", adapter="a+b") == [2]
    httpx.post(f"{serving.url}/v1/unload_lora_adapter", json={"lora_name": "a"})
    seen = scrape(serving)
    assert not values(seen, "requests_total", adapter="a+b")
    assert values(seen, "requests_total", adapter="b") == [1]


def test_responses_are_counted_by_route_and_status(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    complete(serving)
    with pytest.raises(openai.NotFoundError):
        complete(serving, "nobody")
    for path in ("/v1/adapters/one", "/v1/adapters/two", "/nowhere", "/nowhere/else"):
        assert httpx.get(f"{serving.url}{path}").status_code == 404
    seen = scrape(serving)
    assert values(seen, "http_requests_total", route="/v1/completions", code="200") == [1]
    assert values(seen, "http_requests_total", route="/v1/completions", code="404") == [1]
    assert values(seen, "http_requests_total", route="/v1/adapters/{name:path}") == [2]
    assert values(seen, "http_requests_total", route="_other", code="404") == [2]


def test_a_failure_of_our_own_is_counted_as_500(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = serve(FakeScheduler())

    async def burn() -> None:
        raise RuntimeError("on fire")

    monkeypatch.setattr(serving.router.replicas, "reports", burn)
    assert httpx.get(f"{serving.url}/health").status_code == 500
    monkeypatch.undo()
    assert values(scrape(serving), "http_requests_total", route="/health", code="500") == [1]


def test_a_stream_that_breaks_is_counted_beside_its_status(
    serve: Callable[..., Any], saying: Callable[..., tuple[int, ...]]
) -> None:
    serving = serve(FakeScheduler(lambda _: Script(dies_after=1)), recovery_timeout=0.05)
    with pytest.raises(openai.APIError):
        list(complete(serving, stream=True, extra_body={"ignore_eos": True}))
    seen = scrape(serving)
    assert values(seen, "http_requests_total", route="/v1/completions", code="200") == [1]
    assert values(seen, "broken_streams_total") == [1]
    assert values(seen, "requests_total", finish_reason="Unavailable") == [1]


def test_calls_over_a_limit_are_counted_from_zero(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler(), max_in_flight=1)
    seen = scrape(serving)
    assert values(seen, "rejections_total") == [0, 0, 0]
    with pytest.raises(openai.RateLimitError):
        complete(serving, n=2)
    seen = scrape(serving)
    assert values(seen, "rejections_total", reason="router_in_flight") == [1]
    assert values(seen, "http_requests_total", code="429") == [1]


def test_first_tokens_are_timed_by_adapter(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    load(serving, "sql")
    complete(serving, "sql", n=2)
    seen = scrape(serving)
    assert values(seen, "first_tokens_total", adapter="sql") == [2]
    (waited,) = values(seen, "first_token_wait_seconds_total", adapter="sql")
    (together,) = values(seen, "time_to_first_token_seconds_sum")
    assert waited == together > 0


def test_vllms_names_are_there_for_those_who_ask(serve: Callable[..., Any]) -> None:
    plain, gateway = serve(FakeScheduler()), serve(FakeScheduler(), vllm_metrics=True)
    assert "vllm:" not in httpx.get(f"{plain.url}/metrics").text
    load(gateway, "sql")
    gateway.schedulers[0]._script = lambda _: Script(pauses_after=1)
    stream = iter(complete(gateway, "sql", stream=True, extra_body={"ignore_eos": True}))
    next(stream)
    reply = httpx.get(f"{gateway.url}/metrics")
    assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in reply.text.splitlines() if line.startswith("vllm:")]
    samples = dict(line.rsplit(" ", 1) for line in lines)
    assert samples.pop('vllm:num_requests_running{model_name="tiny"}') == "1.0"
    assert samples.pop('vllm:num_requests_waiting{model_name="tiny"}') == "0.0"
    assert samples.pop('vllm:kv_cache_usage_perc{model_name="tiny"}') == "0.0"
    assert samples.pop('vllm:cache_config_info{block_size="64",num_gpu_blocks="100"}') == "1.0"
    ((info, moment),) = samples.items()
    assert info == (
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql",waiting_lora_adapters=""}'
    )
    assert float(moment) > 1.7e9
    gateway.loop.call_soon_threadsafe(gateway.schedulers[0].resume)
    list(stream)
