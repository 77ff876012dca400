"""A classification head that comes with an adapter: through HTTP to every rank, and gone again."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.end_to_end.server import Server, adapter_dirs

pytestmark = pytest.mark.model
NAME, LABELS = "judge", ("grim", "plain", "merry")
PROMPTS = ["Ahoy", "The ship sails at dawn, with the tide.", "Down with them all!"]


@pytest.fixture(scope="module")
def head() -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).normal(size=(len(LABELS), 576), scale=0.1).astype(np.float32)


@pytest.fixture(scope="module")
def judge(
    server: Server, head: np.ndarray[Any, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The LoRAs of the pirate with a head behind them."""
    folder = shutil.copytree(adapter_dirs()["pirate"], tmp_path_factory.mktemp("judge") / NAME)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    save_file(
        {**load_file(weights), "base_model.model.score.weight": torch.from_numpy(head)}, weights
    )
    keys = json.loads(config.read_text()) | {
        "task_type": "SEQ_CLS",
        "modules_to_save": ["classifier", "score"],
        "id2label": dict(enumerate(LABELS)),
    }
    config.write_text(json.dumps(keys))
    reply = server.post("/v1/load_lora_adapter", {"lora_name": NAME, "lora_path": str(folder)})
    assert reply.status_code == 200, reply.text
    yield NAME
    assert server.post("/v1/unload_lora_adapter", {"lora_name": NAME}).status_code == 200
    body = {"model": NAME, "input": "a"}
    assert server.post("/v1/classify", body).status_code == 404


def data(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = reply.json()["data"]
    return found


def test_an_adapters_head_is_behind_its_own_layers(
    server: Server, judge: str, head: np.ndarray[Any, Any]
) -> None:
    body = {"model": judge, "input": PROMPTS}
    classes = data(server, "/v1/classify", {**body, "use_activation": False})
    vectors = data(server, "/v1/embeddings", {**body, "use_activation": False})
    plain = data(server, "/v1/embeddings", {**body, "model": "pirate", "use_activation": False})
    assert [one["embedding"] for one in vectors] == [one["embedding"] for one in plain]
    for one, vector in zip(classes, vectors, strict=True):
        wanted = head @ np.array(vector["embedding"])
        assert one["probs"] == pytest.approx(wanted, rel=1e-4, abs=1e-4)
        assert one["label"] == LABELS[int(wanted.argmax())]
    with_chances = data(server, "/v1/classify", body)
    assert [one["label"] for one in with_chances] == [one["label"] for one in classes]
    assert all(sum(one["probs"]) == pytest.approx(1) for one in with_chances)
    assert data(server, "/v1/classify", body) == with_chances  # from the prefix cache, too


def test_it_does_not_generate_and_the_base_model_does_not_classify(
    server: Server, judge: str
) -> None:
    reply = server.post("/v1/completions", {"model": judge, "prompt": "a", "max_tokens": 1})
    assert reply.status_code == 400 and "classification head" in reply.text
    base = server.get("/v1/models").json()["data"][0]["id"]
    reply = server.post("/v1/classify", {"model": base, "input": "a"})
    assert reply.status_code == 400 and "has no classification head" in reply.text


def test_documents_are_ranked_by_what_the_model_makes_of_them(server: Server) -> None:
    base = server.get("/v1/models").json()["data"][0]["id"]
    body = {"model": base, "query": PROMPTS[0], "documents": [PROMPTS[1], PROMPTS[0], PROMPTS[2]]}
    results = server.post("/v1/rerank", body).json()["results"]
    assert results[0]["index"] == 1 and results[0]["relevance_score"] == pytest.approx(1)
    pairs = {"model": base, "text_1": body["query"], "text_2": body["documents"]}
    scores = [one["score"] for one in data(server, "/v1/score", pairs)]
    assert {one["index"]: one["relevance_score"] for one in results} == dict(enumerate(scores))
