"""A served model as its users meet it: real processes, real clients, two ranks."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import save_file

from tests.end_to_end.asking import cached, complete, tokens, wait_for
from tests.end_to_end.engines import random_prompt
from tests.end_to_end.processes import program
from tests.end_to_end.reference import QUESTIONS, chat_prompt, demo_reference
from tests.end_to_end.server import MODELS, Server, adapter_dirs

pytestmark = [pytest.mark.model, pytest.mark.ray]


@pytest.mark.parametrize("part", [4, pytest.param(1, id="all", marks=pytest.mark.slow)])
def test_greedy_tokens_over_http_are_those_of_transformers_and_peft(
    server: Server, part: int
) -> None:
    """Each model and each prompt at least; all of all are slow."""
    prompts = [chat_prompt(text) for text in QUESTIONS] + [random_prompt(700)]
    asked = [
        (model, prompt)
        for number, model in enumerate(MODELS)
        for place, prompt in enumerate(prompts)
        if (number + place) % part == 0
    ]
    assert {len(prompt) for _, prompt in asked} >= set(map(len, prompts))
    with ThreadPoolExecutor(12) as clients:
        answers = list(clients.map(lambda a: tokens(complete(server, a[0], a[1], 40)), asked))
    for (model, prompt), answer in zip(asked, answers, strict=True):
        adapter = None if model == "smollm2" else model
        assert not demo_reference().wrong_tokens(adapter, prompt, answer, "bfloat16")


@pytest.mark.slow  # `make test-servers`; in the quick run engines see it
def test_sixteen_at_once_get_what_each_gets_alone(server: Server) -> None:
    prompts = [chat_prompt(t) + random_prompt(50 * i) for i, t in enumerate(QUESTIONS)]
    asked = [(MODELS[i % 4], prompts[i % 8]) for i in range(16)]
    alone = [
        tokens(complete(server, model, prompt, 24, cache_salt=f"alone-{i}"))
        for i, (model, prompt) in enumerate(asked)
    ]
    with ThreadPoolExecutor(16) as clients:
        together = list(clients.map(lambda a: tokens(complete(server, a[0], a[1], 24)), asked))
    assert together == alone


@pytest.mark.slow  # `make test-servers`; in the quick run engines see it
def test_a_shared_prompt_is_found_under_its_own_adapter_only(server: Server) -> None:
    shared = random_prompt(1100)[76:]
    assert len(shared) == 1024
    first = complete(server, MODELS[1], [*shared, 500, 501], 4)
    second = complete(server, MODELS[1], [*shared, 600, 601], 4)
    assert cached(first) == 0
    assert cached(second) >= 960
    for other in (MODELS[0], *MODELS[2:]):
        assert cached(complete(server, other, [*shared, 700, 701], 4)) == 0


def test_a_response_carries_its_request_id_once(server: Server) -> None:
    body = {"model": "smollm2", "prompt": "Once", "max_tokens": 1}
    for given, kept in (("job-7", "job-7"), ("a b<script>", "abscript")):
        reply = server.post("/v1/completions", body, {"X-Request-Id": given})
        assert reply.headers.get_list("x-request-id") == [kept]
        assert reply.json()["id"] == f"cmpl-{kept}"
    (made,) = server.get("/version").headers.get_list("x-request-id")
    assert len(made) == 32


def test_the_openai_package_chats_completes_streams_and_lists(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    listed = {model.id: model.model_dump() for model in client.models.list()}
    assert set(listed) == set(MODELS)
    assert listed[MODELS[1]]["parent"] == "smollm2"
    messages: Any = [{"role": "user", "content": QUESTIONS[0]}]
    whole = client.chat.completions.create(
        model="smollm2", messages=messages, temperature=0, max_tokens=24
    )
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    chunks = list(
        client.chat.completions.create(
            model="smollm2",
            messages=messages,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    done = client.completions.create(model=MODELS[1], prompt="Once upon a", max_tokens=8, seed=3)
    same = client.completions.create(model=MODELS[1], prompt="Once upon a", max_tokens=8, seed=3)
    assert done.choices[0].text == same.choices[0].text
    parts = client.completions.create(
        model=MODELS[1], prompt="Once upon a", max_tokens=8, seed=3, stream=True
    )
    assert "".join(p.choices[0].text for p in parts) == done.choices[0].text


def test_mistakes_arrive_as_the_openai_packages_exceptions(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="smollm2", prompt="x", temperature=9)
    with pytest.raises(openai.BadRequestError, match="8192"):
        client.completions.create(model="smollm2", prompt=[5] * 9000)
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model="smollm2", prompt="x", suffix="y")
    with server.client() as plain:
        broken = plain.post("/v1/completions", content=b'{"model": "smollm2", ')
    assert broken.status_code == 400
    assert broken.json()["error"]["type"] == "invalid_request_error"


def test_a_client_that_leaves_frees_what_it_held(server: Server) -> None:
    body = {"model": "smollm2", "prompt": "Count:", "max_tokens": 2000, "ignore_eos": True}
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply,
    ):
        lines = reply.iter_lines()  # kept: the connection closes when its iterator goes
        next(lines)
        assert server.metric("topwork_requests_running") == 1
    wait_for(lambda: server.metric("topwork_requests_running") == 0)
    wait_for(lambda: server.metric("topwork_kv_blocks_held") == 0)


def spoil(kind: str, source: Path, target: Path) -> None:
    """Copy an adapter with one fault."""
    target.mkdir()
    config = json.loads((source / "adapter_config.json").read_text())
    # The demo adapters are bf16, which numpy cannot hold: a float32 copy is as good here.
    tensors = as_float32(source / "adapter_model.safetensors")
    keys = sorted(tensors)
    a_key = next(k for k in keys if "lora_A" in k)
    match kind:
        case "shape":
            tensors[a_key] = tensors[a_key][:, :-8].copy()
        case "module":
            tensors[a_key.replace("self_attn", "cross_attn")] = tensors.pop(a_key)
        case "layer":
            tensors[a_key.replace("layers.0.", "layers.99.")] = tensors.pop(a_key)
        case "rank":
            config["r"] += 1
        case "missing B":
            del tensors[a_key.replace("lora_A", "lora_B")]
        case "nan":
            tensors[a_key][0, 0] = np.nan
        case "dora":
            config["use_dora"] = True
        case "huge":
            config["r"] = 4096
    (target / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, target / "adapter_model.safetensors")
    if kind == "truncated":
        whole = (target / "adapter_model.safetensors").read_bytes()
        (target / "adapter_model.safetensors").write_bytes(whole[: len(whole) // 2])
    if kind == "no weights":
        (target / "adapter_model.safetensors").unlink()
    if kind == "no config":
        (target / "adapter_config.json").unlink()


def as_float32(file: Path) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file as load_torch

    return {name: t.to(torch.float32).numpy().copy() for name, t in load_torch(file).items()}


FAULTS = {
    "truncated": "",
    "no weights": "adapter_model.safetensors",
    "no config": "adapter_config.json",
    "shape": "lora_A",
    "module": "cross_attn",
    "layer": "layers.99",
    "rank": "lora_",
    "missing B": "lora_B",
    "nan": "lora_A",
    "dora": "lora_magnitude_vector",
    "huge": "4096",
}


QUICK = ("truncated", "shape", "nan")  # tests/cluster/adapters/peft shows all without a server


@pytest.mark.parametrize(
    "fault",
    [
        *QUICK,
        *(pytest.param(one, marks=pytest.mark.slow) for one in FAULTS if one not in QUICK),
    ],
)
def test_a_broken_adapter_is_refused_with_the_key_and_disturbs_nobody(
    server: Server, tmp_path: Path, fault: str
) -> None:
    source = adapter_dirs()[MODELS[1]]
    spoil(fault, source, tmp_path / "bad")
    before = [tokens(complete(server, model, chat_prompt(QUESTIONS[0]), 8)) for model in MODELS[:2]]
    body = {"lora_name": "bad", "lora_path": str(tmp_path / "bad")}
    reply = server.post("/v1/load_lora_adapter", body)
    assert reply.status_code == 400, reply.text
    assert FAULTS[fault] in reply.json()["error"]["message"]
    after = [tokens(complete(server, model, chat_prompt(QUESTIONS[0]), 8)) for model in MODELS[:2]]
    assert before == after


def test_an_adapter_loads_unloads_and_comes_back_warm(server: Server) -> None:
    source = adapter_dirs()[MODELS[1]]
    prompt = random_prompt(200)

    def call(route: str, **body: object) -> httpx.Response:
        return server.post(f"/v1/{route}", body)

    name = {"lora_name": "copy"}
    assert call("load_lora_adapter", **name, lora_path=str(source)).status_code == 200
    assert call("load_lora_adapter", **name, lora_path=str(source)).status_code == 400
    copy = complete(server, "copy", prompt, 8)
    assert tokens(copy) == tokens(complete(server, MODELS[1], prompt, 8))
    assert call("unload_lora_adapter", **name).status_code == 200
    assert call("unload_lora_adapter", **name).status_code == 404
    with pytest.raises(AssertionError, match="copy"):
        complete(server, "copy", prompt, 8)
    listed = server.get("/v1/adapters").json()
    assert "copy" not in json.dumps(listed)


def test_http_and_haproxys_statistics_are_open_to_this_machine_alone(server: Server) -> None:
    haproxies = [pid for pid in server.processes() if program(pid) == "haproxy"]
    assert len(haproxies) == 1
    places = {os.readlink(link) for link in Path(f"/proc/{haproxies[0]}/fd").iterdir()}
    sockets = {place[len("socket:[") : -1] for place in places if place.startswith("socket:[")}
    listening = "0A"
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{haproxies[0]}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == listening and fields[9] in sockets:
                host, port = fields[1].split(":")
                found.append((host, int(port, 16)))
    assert {host for host, _ in found} == {"0100007F"}  # 127.0.0.1
    assert server.port in {port for _, port in found}


def test_the_greeting_tells_by_how_many_threads_the_ranks_compute(server: Server) -> None:
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    each = f"{threads} thread{'s' if threads > 1 else ''}"
    assert f"It computes on the CPU: 2 ranks, each of {each}." in server.log.read_text()


def test_whatever_wakes_up_beside_the_ranks_halts_none_of_them(server: Server) -> None:
    ranks = set(server.rank_pids())
    assert {os.sched_getscheduler(pid) for pid in ranks} == {os.SCHED_OTHER}
    others = server.processes() - ranks
    # A scheduler's main thread only waits; the one that plans halts others.
    assert {os.sched_getscheduler(pid) for pid in others} == {os.SCHED_BATCH}


def test_health_metrics_and_version_answer(server: Server) -> None:
    assert server.is_healthy()
    assert server.get("/ready").status_code == 200
    assert "version" in server.get("/version").json()
    assert server.metric("topwork_generation_tokens_total") > 0


def test_a_reader_of_kv_events_hears_of_new_pages_and_of_those_that_an_unload_drops(
    server: Server,
) -> None:
    name, directory = MODELS[2], adapter_dirs()[MODELS[2]]
    prompt = random_prompt(700)[300:500]

    def stored(events: list[dict[str, Any]]) -> set[str]:
        held: set[str] = set()
        for event in events:
            if event["type"] == "BlockStored":
                held.update(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                held.difference_update(event["block_hashes"])
            else:
                held.clear()
        return held

    with server.client() as client, client.stream("GET", "/v1/kv_events") as stream:
        assert stream.status_code == 200
        events: list[dict[str, Any]] = []
        batches = (
            json.loads(line.removeprefix("data: "))
            for line in stream.iter_lines()
            if line.startswith("data: ")
        )
        events += next(batches)["events"]
        assert events[0]["type"] == "AllBlocksCleared"
        complete(server, name, prompt, 2)
        while not (ours := [e for e in events if e.get("token_ids", [])[:64] == prompt[:64]]):
            events += next(batches)["events"]
        assert ours[0]["lora_name"] and ours[0]["block_size"] == 64 and ours[0]["medium"] == "GPU"
        assert set(ours[0]["block_hashes"]) <= stored(events)
        assert server.post("/v1/unload_lora_adapter", {"lora_name": name}).status_code == 200
        while set(ours[0]["block_hashes"]) & stored(events):
            events += next(batches)["events"]
    body = {"lora_name": name, "lora_path": str(directory)}
    assert server.post("/v1/load_lora_adapter", body).status_code == 200
