"""Weighted sums of adapters over HTTP: what reaches a scheduler, what is counted or refused."""

import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cluster.request import BASE, Request, compose
from cluster.router.testing.fake_backend import NUM_BYTES
from cluster.router.testing.fake_scheduler import FakeScheduler, Script

HELLO: Any = [{"role": "user", "content": "hello"}]
PATHS = {
    "json": "/a/json",
    "pirate": "/a/pirate",
    "again": "/a/json",
    "dora": "/a/dora",
    "plus+sign": "/a/plus",
}


def digest(name: str) -> str:
    return sha256(PATHS[name].encode()).hexdigest()


def entry(name: str, weight: Any = 1.0) -> dict[str, Any]:
    return {"name": name, "weight": weight}


def with_adapters(serving: Any) -> Any:
    for name, path in PATHS.items():
        serving.run(serving.backend.load(name, path, False, False))
    return serving


@pytest.fixture(scope="module")
def serving(serve_once: Callable[..., Any]) -> Iterator[Any]:
    """Return a server with adapters, shared by all tests that leave them as they are."""
    yield with_adapters(serve_once(FakeScheduler()))


def post(serving: Any, lora: Any, key: str = "none", **more: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 3, "lora": lora} | more
    return httpx.post(
        f"{serving.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}
    )


def asked(serving: Any, lora: Any, **more: Any) -> Request:
    """Ask for a sum and return the request that reached the scheduler."""
    before = len(serving.schedulers[0].submitted)
    reply = post(serving, lora, **more)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == "tiny"
    (request,) = serving.schedulers[0].submitted[before:]
    assert isinstance(request, Request)
    return request


@pytest.mark.parametrize(
    ("lora", "parts"),
    [
        ([entry("json", 0.5), entry("pirate", -2)], [("json", 0.5), ("pirate", -2.0)]),
        ([{"name": "json"}], [("json", 1.0)]),
        ([entry("json", 100), entry("pirate", 1e-300)], [("json", 100.0), ("pirate", 1e-300)]),
        ([entry("json", 0.25), entry("json", 0.5)], [("json", 0.75)]),
        ([entry("json", 0.25), entry("again", 0.5)], [("json", 0.75)]),
        ([entry("json", 0.25), entry("pirate"), entry("again", -0.25)], [("pirate", 1.0)]),
        ([entry("json", 1), entry("again", -1)], []),
        ([entry("json", -0.0)], []),
        ([entry("dora")], [("dora", 1.0)]),
        ([entry("dora"), entry("json", 0)], [("dora", 1.0)]),
        ([entry("dora", 0), entry("json", 0.5)], [("json", 0.5)]),
        ([entry("json", 0.1)] * 8, [("json", sum([0.1] * 8))]),
        (None, []),
    ],
)
def test_a_sum_reaches_the_scheduler_as_the_digests_and_weights_of_its_parts(
    serving: Any, lora: Any, parts: list[tuple[str, float]]
) -> None:
    request = asked(serving, lora)
    assert request.adapter == compose((digest(name), weight) for name, weight in parts)
    assert (request.adapter == BASE) == (not parts)
    assert request.adapter_bytes == NUM_BYTES * len(parts)


def test_an_adapter_named_as_model_is_itself_in_a_sum_of_one(serving: Any) -> None:
    reply = httpx.post(
        f"{serving.url}/v1/completions", json={"model": "json", "prompt": [5, 6], "max_tokens": 3}
    )
    assert reply.json()["model"] == "json"
    named = serving.schedulers[0].submitted[-1]
    summed = asked(serving, [entry("json")])
    assert (named.adapter, named.adapter_bytes) == (summed.adapter, summed.adapter_bytes)
    assert named.adapter_bytes == NUM_BYTES


def test_the_order_of_a_sum_changes_neither_cache_nor_tokens(serving: Any) -> None:
    lora = [entry("json", 0.1), entry("pirate", 0.2), entry("again", 0.3)]
    answers = []
    for order in (lora, lora[::-1], lora[1:] + lora[:1]):
        text = post(serving, order, cache_salt="s").json()["choices"][0]["text"]
        request = serving.schedulers[0].submitted[-1]
        answers.append((request.adapter, request.cache_salt, request.token_ids, text))
    assert answers == [answers[0]] * 3
    assert post(serving, lora[:2]).json()["choices"][0]["text"] != answers[0][-1]


def test_chats_take_sums_whole_streamed_and_with_several_choices(serving: Any) -> None:
    client = serving.client()
    expected = compose([(digest("json"), 0.5), (digest("pirate"), 0.5)])
    more: Any = {"lora": [entry("json", 0.5), entry("pirate", 0.5)]}
    before = len(serving.schedulers[0].submitted)
    whole = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=2, n=2, extra_body=more
    )
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=2, stream=True, extra_body=more
        )
    )
    assert whole.model == chunks[0].model == "tiny"
    requests = serving.schedulers[0].submitted[before:]
    assert [(one.adapter, one.adapter_bytes) for one in requests] == [(expected, 2 * NUM_BYTES)] * 3


def test_each_name_is_looked_up_once_under_the_requests_id(serving: Any) -> None:
    serving.backend.resolved.clear()
    lora = [entry("pirate"), entry("json"), entry("pirate", 2)]
    httpx.post(
        f"{serving.url}/v1/completions",
        json={"model": "tiny", "prompt": [5], "max_tokens": 1, "lora": lora},
        headers={"X-Request-Id": "r7"},
    )
    assert serving.backend.resolved == [("pirate", "r7"), ("json", "r7")]


def test_a_split_is_kept_in_a_sum(serve: Callable[..., Any]) -> None:
    serving = with_adapters(serve(FakeScheduler()))
    serving.run(serving.backend.load("json", "/a/json2", True, False))
    serving.run(serving.backend.split("json", {1: 50, 2: 50}))
    seen = set()
    for number in range(20):
        resolved = serving.run(serving.backend.resolve("json", f"r{number}"))
        lora = [entry("json", 0.5), entry("pirate", 0.5)]
        httpx.post(
            f"{serving.url}/v1/completions",
            json={"model": "tiny", "prompt": [5], "max_tokens": 1, "lora": lora},
            headers={"X-Request-Id": f"r{number}"},
        )
        expected = compose([(resolved.digest, 0.5), (digest("pirate"), 0.5)])
        assert serving.schedulers[0].submitted[-1].adapter == expected
        seen.add(resolved.version)
    assert seen == {1, 2}


@pytest.mark.parametrize(
    ("lora", "param", "reason"),
    [
        ([], "lora", "at least 1 item"),
        ([entry("json")] * 9, "lora", "at most 8 items"),
        ({}, "lora", "valid array"),
        ("json", "lora", "valid array"),
        (True, "lora", "valid array"),
        (["json"], "lora.0", "an object"),
        ([None], "lora.0", "an object"),
        ([[]], "lora.0", "an object"),
        ([{}], "lora.0.name", "Field required"),
        ([{"weight": 1}], "lora.0.name", "Field required"),
        ([entry("")], "lora.0.name", "at least 1 character"),
        ([entry(7)], "lora.0.name", "valid string"),
        ([entry("json", "1")], "lora.0.weight", "valid number"),
        ([entry("json", True)], "lora.0.weight", "valid number"),
        ([entry("json", None)], "lora.0.weight", "valid number"),
        ([entry("json", [1])], "lora.0.weight", "valid number"),
        ([entry("json"), entry("json", 100.5)], "lora.1.weight", "less than or equal to 100"),
        ([entry("json", -101)], "lora.0.weight", "greater than or equal to -100"),
        ([entry("json", 10**400)], "lora.0.weight", ""),
        ([entry("json") | {"scale": None}], "lora.0.scale", "not permitted"),
        ([entry("json") | {"user": "x"}], "lora.0.user", "not permitted"),
        ([entry("json") | {"lora": []}], "lora.0.lora", "not permitted"),
        ([entry("json") | {"k" * 9999: 1}], "lora.0." + "k" * 193, "not permitted"),
        ([entry("tiny")], "lora", "is the base model"),
        ([entry("dora", 0.5)], "lora", "'dora' can only be used alone with weight 1"),
        ([entry("json"), entry("dora")], "lora", "'dora' can only be used alone"),
        ([entry("dora"), entry("dora")], "lora", "'dora' can only be used alone"),
    ],
)
def test_a_bad_sum_is_refused_by_name(serving: Any, lora: Any, param: str, reason: str) -> None:
    before = len(serving.schedulers[0].submitted)
    for route, prompt in (
        ("completions", {"prompt": [5]}),
        ("chat/completions", {"messages": HELLO}),
    ):
        body = json.dumps({"model": "tiny", "lora": lora} | prompt)
        reply = httpx.post(f"{serving.url}/v1/{route}", content=body)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, param)
        assert reason in error["message"] and len(error["message"]) <= 500
    assert len(serving.schedulers[0].submitted) == before


@pytest.mark.parametrize("weight", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "0x1", "١"])
def test_a_weight_that_is_no_finite_number_is_a_400(serving: Any, weight: str) -> None:
    body = '{"model":"tiny","prompt":[5],"lora":[{"name":"json","weight":' + weight + "}]}"
    reply = httpx.post(f"{serving.url}/v1/completions", content=body.encode())
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["nobody", BASE, "x" * 100_000, "../json", "json,pirate", "\x00"])
def test_a_name_that_stands_for_nothing_is_openais_not_found(serving: Any, name: str) -> None:
    reply = post(serving, [entry("json"), entry(name)])
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (404, "lora", "model_not_found")
    assert len(error["message"]) < 2000


@pytest.mark.parametrize("model", ["json", "nobody"])
def test_a_sum_goes_on_top_of_the_base_model_only(serving: Any, model: str) -> None:
    reply = post(serving, [entry("json")], model=model)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "model")
    assert "must be the base model, 'tiny'" in error["message"]
    assert "name the adapter in lora instead" in error["message"]


def test_the_tokenizer_takes_a_model_and_no_sum(serving: Any) -> None:
    for route, content in (("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [5]})):
        url = f"{serving.url}/{route}"
        assert httpx.post(url, json=content | {"model": "json"}).status_code == 200
        error = httpx.post(url, json=content | {"lora": [entry("json")]}).json()["error"]
        assert error["param"] == "lora"


def test_a_key_sums_its_own_adapters_only(serve: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(
        "- {key: alice-secret, tenant: alice, adapters: [json, pirate]}"
    )
    serving = with_adapters(serve(FakeScheduler(), api_key_file=str(tmp_path / "keys.yaml")))
    assert post(serving, [entry("json"), entry("pirate")], "alice-secret").status_code == 200
    serving.backend.resolved.clear()
    for name in ("again", "nobody", "x" * 100_000):
        reply = post(serving, [entry("json"), entry(name, 0)], "alice-secret")
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (404, "lora")
        assert error["message"] == f"the model {name[:256]!r} does not exist"
        assert error["code"] == "model_not_found"
    assert serving.backend.resolved == []  # nothing was read for them
    assert len(serving.schedulers[0].submitted) == 1


def metrics(serving: Any) -> str:
    return httpx.get(f"{serving.url}/metrics").text


def requests_of(serving: Any) -> dict[str, float]:
    """Return the answers that are counted, by label."""
    lines = [line for line in metrics(serving).splitlines() if "topwork_requests_total{" in line]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


def test_a_sum_is_counted_under_its_names_until_one_of_them_is_unloaded(
    serve: Callable[..., Any],
) -> None:
    serving = with_adapters(serve(FakeScheduler()))
    for lora in (
        [entry("pirate"), entry("json", 2)],
        [entry("json"), entry("pirate"), entry("json")],
        [entry("pirate")],
        [entry("again"), entry("json", -1)],
        None,
    ):
        asked(serving, lora)
    assert requests_of(serving) == {"json+pirate": 2, "pirate": 1, "again+json": 1, "tiny": 1}
    serving.run(serving.router.unload("json"))
    assert requests_of(serving) == {"pirate": 1, "tiny": 1}
    assert "json" not in metrics(serving)
    serving.run(serving.router.unload("pirate"))
    assert requests_of(serving) == {"tiny": 1}


def test_sums_over_the_cap_share_one_label(serve: Callable[..., Any]) -> None:
    serving = with_adapters(serve(FakeScheduler(), max_adapter_labels=2))
    for lora in ([entry("json"), entry("pirate")], [entry("json")], [entry("pirate")], None):
        asked(serving, lora)
    assert requests_of(serving) == {"json+pirate": 1, "json": 1, "_other": 2}
    serving.run(serving.router.unload("json"))
    asked(serving, None)
    assert requests_of(serving) == {"_other": 2, "tiny": 1}


def test_a_plus_in_a_name_hides_no_series_from_unloading(serve: Callable[..., Any]) -> None:
    serving = with_adapters(serve(FakeScheduler()))
    for name in ("plus", "sign"):
        serving.run(serving.backend.load(name, f"/b/{name}", False, False))
    asked(serving, [entry("plus"), entry("sign")])
    asked(serving, [entry("plus+sign")])
    assert requests_of(serving) == {"plus+sign": 2}
    serving.run(serving.router.unload("plus+sign"))
    assert requests_of(serving) == {}


def test_a_call_that_outlives_its_adapter_brings_no_series_back(serve: Callable[..., Any]) -> None:
    serving = with_adapters(serve(FakeScheduler(lambda _: Script(pauses_after=1))))
    client = serving.client()
    stream = client.completions.create(
        model="json", prompt=[5], max_tokens=2, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    serving.run(serving.router.unload("json"))
    serving.loop.call_soon_threadsafe(serving.schedulers[0].resume)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert requests_of(serving) == {"_other": 1}
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="json", prompt=[5])
