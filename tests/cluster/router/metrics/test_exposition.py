"""What routers count of calls, and what any of them shows of all."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.router.metrics import aggregation
from cluster.router.metrics.request_metrics import REASONS
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


def test_web_pages_of_strangers_that_are_refused_are_counted(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler(), allowed_origins=())
    page = {"Origin": "https://evil.example"}
    assert httpx.get(f"{serving.url}/v1/models", headers=page).status_code == 403
    assert values(scrape(serving), "http_requests_total", route="_other", code="403") == [1]


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
    assert values(seen, "rejections_total") == [0] * len(REASONS)
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
    assert samples['vllm:num_requests_running{engine="0",model_name="tiny"}'] == "1.0"
    assert samples['vllm:num_requests_waiting{engine="0",model_name="tiny"}'] == "0.0"
    assert samples['vllm:kv_cache_usage_perc{engine="0",model_name="tiny"}'] == "0.0"
    config = 'vllm:cache_config_info{block_size="64",engine="0",num_gpu_blocks="100"}'
    assert samples[config] == "1.0"
    moment = samples[
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql",waiting_lora_adapters=""}'
    ]
    assert float(moment) > 1.7e9
    gateway.loop.call_soon_threadsafe(gateway.schedulers[0].resume)
    list(stream)


# What vLLM 0.33's dashboards for Grafana and Perses ask for, all with model_name; and what scales
# and scores: KEDA by the queue, the endpoint picker of Gateway API, llm-d's variant autoscaler.
ASKED_OF_VLLM = {
    "e2e_request_latency_seconds": ("_bucket", "_count", "_sum"),
    "generation_tokens_total": ("",),
    "inter_token_latency_seconds": ("_bucket", "_count", "_sum"),
    "iteration_tokens_total": ("_count",),
    "kv_cache_usage_perc": ("",),
    "num_requests_running": ("",),
    "num_requests_waiting": ("",),
    "num_preemptions_total": ("",),
    "prefix_cache_hits_total": ("",),
    "prefix_cache_queries_total": ("",),
    "prompt_tokens_total": ("",),
    "request_decode_time_seconds": ("_sum",),
    "request_generation_tokens": ("_bucket", "_sum", "_count"),
    "request_max_num_generation_tokens": ("_sum",),
    "request_prefill_time_seconds": ("_sum",),
    "request_prompt_tokens": ("_bucket", "_sum", "_count"),
    "request_queue_time_seconds": ("_sum",),
    "request_success_total": ("",),
    "request_time_per_output_token_seconds": ("_bucket", "_count", "_sum"),
    "time_to_first_token_seconds": ("_bucket", "_count", "_sum"),
}
ASKED_WITHOUT_MODEL = {
    "cache_config_info": {"block_size", "num_gpu_blocks"},
    "lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
}


def test_dashboards_and_autoscalers_made_for_vllm_find_all_that_they_ask_for(
    serve: Callable[..., Any],
) -> None:
    serving = serve(FakeScheduler(), vllm_metrics=True)
    for _ in range(3):
        complete(serving, n=3)
    labels_of: dict[str, set[str]] = {}
    values_of: dict[str, float] = {}
    for (name, labels), value in scrape(serving).items():
        labels_of.setdefault(name, {label for label, _ in labels})
        values_of[name] = values_of.get(name, 0.0) + value
    for name, endings in ASKED_OF_VLLM.items():
        for ending in endings:
            having = labels_of[f"vllm:{name}{ending}"]
            assert {"model_name", "engine"} <= having, name
            assert ("le" in having) == (ending == "_bucket"), name
    assert "finished_reason" in labels_of["vllm:request_success_total"]
    for name, labels in ASKED_WITHOUT_MODEL.items():
        assert labels <= labels_of[f"vllm:{name}"], name
    for name, value in (
        ("request_success_total", 9),
        ("time_to_first_token_seconds_count", 9),
        ("inter_token_latency_seconds_count", 9),
        ("request_time_per_output_token_seconds_count", 9),
        ("request_prompt_tokens_sum", 18),
        ("request_generation_tokens_sum", 18),
        ("request_params_max_tokens_sum", 18),
        ("request_prefill_kv_computed_tokens_sum", 18),
        ("request_params_n_sum", 9),
        ("request_params_n_count", 3),
        ("request_max_num_generation_tokens_sum", 6),
    ):
        assert values_of[f"vllm:{name}"] == value, name


def test_an_answer_that_nobody_waits_for_is_aborted_whatever_becomes_of_its_adapter(
    serve: Callable[..., Any],
) -> None:
    serving = serve(FakeScheduler(lambda _: Script(pauses_after=1)), vllm_metrics=True)
    load(serving, "sql")
    stream = complete(serving, "sql", stream=True, n=3, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    serving.run(serving.schedulers[0].wait_until(lambda it: len(it.aborted) == 3))
    serving.run(serving.router.unload("sql"))
    seen = scrape(serving)
    assert values(seen, "finished_requests_total", finished_reason="abort") == [3]
    assert values(seen, "requests_total") == []
