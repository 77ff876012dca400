"""Adapters, models, tokenizing, health, metrics and keys, as operators call them."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from cluster.adapters.records import AdapterRecord
from cluster.engine.status import EngineStatus
from cluster.request import BASE
from cluster.router.metrics.adapter_metrics import adapter_families
from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from cluster.scheduler.stats import SlotStats
from tests.end_to_end.asking import wait_for

HELLO: Any = [{"role": "user", "content": "hello"}]

# The fake says of the n-th that it is n.
STATUS_METRICS = (
    "kv_host_blocks_free",
    "kv_host_blocks_cached",
    "kv_host_blocks",
    "kv_host_blocks_saved",
    "kv_host_blocks_restored",
    "kv_host_blocks_evicted",
    "forked_sequences",
    "adapter_slot_wait_longest_steps",
    "adapter_slot_wait_bound_steps",
    "adapter_slot_late_hand_overs",
    "engine_steps_ahead",
    "engine_grammar_masks",
    "engine_late_grammar_masks",
)


def load(serving: Any, name: str, path: str = "/adapters/one", **more: Any) -> httpx.Response:
    return httpx.post(
        f"{serving.url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path} | more
    )


def unload(serving: Any, name: str) -> httpx.Response:
    return httpx.post(f"{serving.url}/v1/unload_lora_adapter", json={"lora_name": name})


def test_an_adapter_is_loaded_used_listed_and_unloaded(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler(), FakeScheduler(replica="1"))
    client = serving.client()
    reply = load(serving, "sql", pinned=True)
    assert (reply.status_code, reply.text) == (
        200,
        "Success: LoRA adapter 'sql' added successfully.",
    )
    client.chat.completions.create(model="sql", messages=HELLO, max_tokens=2)
    client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)
    digest = sha256(b"/adapters/one").hexdigest()
    used = [request.adapter for fake in serving.schedulers for request in fake.submitted]
    assert sorted(used) == sorted([digest, BASE])
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny", "sql"]
    assert [model.parent for model in models] == [None, "tiny"]  # type: ignore[attr-defined]
    assert client.models.retrieve("sql").id == "sql"
    entry = httpx.get(f"{serving.url}/v1/adapters").json()["data"][0]
    assert (entry["digest"], entry["version"], entry["pinned"]) == (digest, 1, True)
    reply = unload(serving, "sql")
    assert (reply.status_code, reply.text) == (
        200,
        "Success: LoRA adapter 'sql' removed successfully.",
    )
    assert [fake.unloaded for fake in serving.schedulers] == [[digest], [digest]]
    assert serving.backend.forgotten == [digest]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="sql", messages=HELLO)


def test_content_with_another_name_outlives_the_first(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    load(serving, "a")
    load(serving, "b")
    assert unload(serving, "a").status_code == 200
    assert serving.schedulers[0].unloaded == []
    assert serving.backend.forgotten == []


def test_unloading_does_not_wait_for_a_scheduler_that_is_stopped(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler(), scheduler_timeout=0.3)
    load(serving, "a")
    serving.schedulers[0].is_hung = True
    assert unload(serving, "a").status_code == 200
    assert serving.schedulers[0].unloaded == []
    assert len(serving.backend.forgotten) == 1


def test_bad_adapter_calls_have_their_status(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    assert load(serving, "a").status_code == 200
    assert load(serving, "a", "/adapters/two").status_code == 400
    assert load(serving, "a", "/adapters/two", load_inplace=True).status_code == 200
    assert load(serving, "c", "/adapters/broken").status_code == 400
    assert load(serving, "tiny").status_code == 400
    assert load(serving, "has space").status_code == 400
    assert load(serving, "a", is_3d_lora_weight=True).json()["error"]["param"] == (
        "is_3d_lora_weight"
    )
    assert unload(serving, "nobody").status_code == 404
    assert httpx.post(f"{serving.url}/v1/load_lora_adapter", json={}).status_code == 400


def test_tokenize_and_detokenize_are_inverse(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    text = "hello 🌳"
    reply = httpx.post(
        f"{serving.url}/tokenize", json={"prompt": text, "return_token_strs": True}
    ).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    spelled = serving.router.tokenizer.raw_token
    assert reply["token_strs"] == [spelled(token_id) for token_id in reply["tokens"]]
    assert "\N{DECIDUOUS TREE}" not in reply["token_strs"], "its bytes, as the vocabulary has them"
    assert reply["max_model_len"] == 256
    back = httpx.post(f"{serving.url}/detokenize", json={"tokens": reply["tokens"]})
    assert back.json() == {"prompt": text}
    special = reply["tokens"] + [2]
    for skips, text_then in ((False, text + serving.router.tokenizer.token_text(2)), (True, text)):
        body = {"tokens": special, "skip_special_tokens": skips}
        assert httpx.post(f"{serving.url}/detokenize", json=body).json() == {"prompt": text_then}
    talk = httpx.post(f"{serving.url}/tokenize", json={"messages": HELLO}).json()
    serving.client().chat.completions.create(model="tiny", messages=HELLO, max_tokens=1)
    assert tuple(talk["tokens"]) == serving.schedulers[0].submitted[0].token_ids
    assert httpx.post(f"{serving.url}/tokenize", json={}).status_code == 400
    assert httpx.post(f"{serving.url}/detokenize", json={"tokens": [-1]}).status_code == 400


def test_health_follows_every_scheduler(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler(), FakeScheduler(replica="1"), health_timeout=10.0)
    assert httpx.get(f"{serving.url}/health").status_code == 200
    assert httpx.get(f"{serving.url}/ready").status_code == 200
    serving.schedulers[1].reason = "rank 1 made no step for 9 s"
    reply = httpx.get(f"{serving.url}/health")
    assert reply.status_code == 503
    assert reply.json()["reasons"] == ["scheduler 1: rank 1 made no step for 9 s"]
    assert httpx.get(f"{serving.url}/ready").status_code == 200
    assert httpx.get(f"{serving.url}/version").json() == {"version": "1.2.3"}


def test_a_scheduler_that_does_not_answer_is_not_healthy(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler(), health_timeout=0.1)
    serving.schedulers[0].is_hung = True
    reply = httpx.get(f"{serving.url}/health")
    assert reply.status_code == 503
    assert reply.json()["reasons"] == ["scheduler 0 does not answer"]
    assert httpx.get(f"{serving.url}/ready").status_code == 503


def test_draining_refuses_new_calls_and_ends_the_running_ones(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler(lambda _: Script(pauses_after=1)))
    client = serving.client()
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=20, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    reply = httpx.post(f"{serving.url}/v1/drain")
    assert reply.json() == {
        "status": "draining",
        "refusing": "all routers, within 0.05 s",
        "in_flight": 1,
        "schedulers": [{"replica": "0", "running": 1, "waiting": 0}],
    }
    assert httpx.get(f"{serving.url}/ready").status_code == 503
    with pytest.raises(openai.InternalServerError, match="drained"):
        client.chat.completions.create(model="tiny", messages=HELLO)
    serving.loop.call_soon_threadsafe(serving.schedulers[0].resume)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_a_drain_that_is_taken_back_lets_new_calls_in(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    httpx.post(f"{serving.url}/v1/drain")
    assert httpx.get(f"{serving.url}/ready").status_code == 503
    reply = httpx.delete(f"{serving.url}/v1/drain")
    assert reply.json() == {"status": "serving", "admitting": "all routers, within 0.05 s"}
    wait_for(lambda: httpx.get(f"{serving.url}/ready").status_code == 200)
    serving.client().chat.completions.create(model="tiny", messages=HELLO, max_tokens=1)


def test_metrics_parse_and_count(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    load(serving, "sql")
    for model in ("tiny", "sql", "sql"):
        serving.client().completions.create(
            model=model, prompt=[5, 6], max_tokens=3, extra_body={"ignore_eos": True}
        )
    reply = httpx.get(f"{serving.url}/metrics")
    assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(reply.text)}
    samples = [sample for family in families.values() for sample in family.samples]
    assert all(sample.name.startswith("topwork_") for sample in samples)
    assert not any(sample.name.endswith("_created") for sample in samples)
    counts = {
        (sample.labels["adapter"], sample.labels["finish_reason"]): sample.value
        for sample in families["topwork_requests"].samples
    }
    assert counts == {("tiny", "length"): 1, ("sql", "length"): 2}
    tokens = families["topwork_generation_tokens"].samples
    assert sum(sample.value for sample in tokens) == 9
    ttft = families["topwork_time_to_first_token_seconds"].samples
    assert [sample.value for sample in ttft if sample.name.endswith("_count")] == [3]
    assert families["topwork_kv_blocks_free"].samples[0].labels == {"replica": "0"}
    assert families["topwork_rank_last_step_age_seconds"].samples[0].labels == {
        "replica": "0",
        "rank": "0",
    }
    assert families["topwork_adapter_resident"].samples[0].labels["adapter"] == "sql"
    assert families["topwork_scheduler_up"].samples[0].value == 1
    for number, name in enumerate(STATUS_METRICS, 1):
        assert families[f"topwork_{name}"].samples[0].value == number
    unload(serving, "sql")
    assert 'adapter="sql"' not in httpx.get(f"{serving.url}/metrics").text


def test_adapters_over_the_cap_share_one_label(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler(), max_adapter_labels=2)
    for number in range(3):
        load(serving, f"a{number}", f"/adapters/{number}")
        serving.client().completions.create(model=f"a{number}", prompt=[5], max_tokens=1)
    text = httpx.get(f"{serving.url}/metrics").text
    assert 'topwork_requests_total{adapter="_other"' in text
    assert 'topwork_requests_total{adapter="a1"' in text
    assert 'topwork_requests_total{adapter="a2"' not in text


def test_what_is_used_keeps_its_series_among_thousands_and_the_sums_are_complete() -> None:
    record = AdapterRecord("", None, 1, "/", 8, 1, (), False, "disk")
    records = [structs.replace(record, name=f"a{number:04}") for number in range(2999)]
    records.append(structs.replace(record, name="used", digest="used"))
    idle = EngineStatus("0", lambda: 0.0).snapshot(1, None, None, {})
    slots = (SlotStats(0, "other:2.0,used:0.5", False, 3),)
    status = structs.replace(idle, scheduler=structs.replace(idle.scheduler, slots=slots))
    families = {one.name: one.samples for one in adapter_families(records, [status], 10)}
    counts = {s.labels["level"]: s.value for s in families["topwork_adapters_registered"]}
    assert counts == {"device": 0, "host": 0, "disk": 3000, "gone": 0}
    in_flight = {s.labels["adapter"]: s.value for s in families["topwork_adapter_inflight"]}
    assert (len(in_flight), in_flight["used"]) == (10, 3)


KEYS = f"""
- key: alice-secret
  tenant: alice
  adapters: [a]
  weight: 5
- key_sha256: {sha256(b"root-secret").hexdigest()}
  tenant: ops
  adapters: "*"
  admin: true
  min_priority: -10
"""


@pytest.fixture
def guarded(serve: Callable[..., Any], tmp_path: Path) -> Any:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    serving = serve(FakeScheduler(), api_key_file=str(path))
    for name in ("a", "b"):
        serving.run(serving.backend.load(name, f"/adapters/{name}", False, False))
    return serving


def test_a_call_without_a_known_key_is_unauthorized(guarded: Any) -> None:
    for key in ("wrong-secret", "alice-secre", ""):
        with pytest.raises(openai.AuthenticationError) as caught:
            guarded.client(key or "-").chat.completions.create(model="tiny", messages=HELLO)
        assert "secre" not in caught.value.message.replace("Bearer", "")
    assert httpx.get(f"{guarded.url}/v1/models").status_code == 401
    assert httpx.get(f"{guarded.url}/health").status_code == 200


def test_a_key_opens_its_own_adapters_only(guarded: Any) -> None:
    client = guarded.client("alice-secret")
    for model in ("tiny", "a"):
        client.chat.completions.create(model=model, messages=HELLO, max_tokens=1)
    for model in ("b", "does-not-exist"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model=model, messages=HELLO)
        assert caught.value.code == "model_not_found"
    assert [model.id for model in client.models.list()] == ["tiny", "a"]
    assert len(guarded.client("root-secret").models.list().data) == 3


def test_a_key_gives_its_requests_tenant_weight_and_the_right_to_a_priority(guarded: Any) -> None:
    def ask(key: str, **extra: Any) -> Any:
        guarded.client(key).completions.create(
            model="tiny", prompt=[5], max_tokens=1, n=2, extra_body=extra
        )
        first, second = guarded.schedulers[0].submitted[-2:]
        rights = (first.tenant, first.weight, first.priority)
        assert (second.tenant, second.weight, second.priority) == rights
        return rights

    assert ask("alice-secret") == ("alice", 5, 0)
    assert ask("alice-secret", priority=7) == ("alice", 5, 7)
    assert ask("root-secret", priority=-10) == ("ops", 1, -10)
    for key, priority, least in (("alice-secret", -1, 0), ("root-secret", -11, -10)):
        with pytest.raises(openai.PermissionDeniedError, match=f"is less than {least}") as caught:
            ask(key, priority=priority)
        assert caught.value.param == "priority"
    assert len(guarded.schedulers[0].submitted) == 6


def test_without_keys_any_priority_goes_through(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    serving.client().chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=1, extra_body={"priority": -(2**31)}
    )
    (request,) = serving.schedulers[0].submitted
    assert (request.priority, request.tenant, request.weight) == (-(2**31), "", 1)


def test_only_an_admin_changes_what_is_served(guarded: Any) -> None:
    body = {"lora_name": "c", "lora_path": "/adapters/c"}
    changes = [f"adapters/a/{change}" for change in ("rollback", "split", "pin")]
    for path in ("load_lora_adapter", "unload_lora_adapter", "drain", *changes):
        for key, status in (("alice-secret", 403), (None, 401)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            reply = httpx.post(f"{guarded.url}/v1/{path}", json=body, headers=headers)
            assert reply.status_code == status
            for taken_back in ("drain", "adapters/a/pin"):
                reply = httpx.delete(f"{guarded.url}/v1/{taken_back}", headers=headers)
                assert reply.status_code == status
    reply = httpx.post(
        f"{guarded.url}/v1/load_lora_adapter",
        json=body,
        headers={"Authorization": "Bearer root-secret"},
    )
    assert reply.status_code == 200
