"""Adapters that are uploaded to a served model: by curl, by a trainer's callback, in halves."""

import json
import re
import shlex
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from deploy.demo.many_adapters import make_many
from tests.end_to_end.asking import complete, tokens, wait_for
from tests.end_to_end.engines import random_prompt
from tests.end_to_end.server import MODEL_DIR, Server

pytestmark = [pytest.mark.model, pytest.mark.ray]
PAGE = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()
PROMPT = random_prompt(40)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_many(tmp_path_factory.mktemp("many"), 2)


def block(language: str, word: str) -> str:
    """Return the first block of code in docs/adapters.md that has a word."""
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return next(code for code in found if word in code)


def unload(server: Server, name: str) -> None:
    reply = server.post("/v1/unload_lora_adapter", {"lora_name": name})
    assert reply.status_code == 200, reply.text


def test_the_line_of_curl_in_the_docs_serves_what_a_directory_would(
    server: Server, folders: list[Path]
) -> None:
    line = block("", "curl -T").replace("localhost:8000", f"127.0.0.1:{server.port}")
    line = line.replace("/pirate?", "/uploaded?")
    for version, folder in enumerate(folders, start=1):
        done = subprocess.run(
            line, shell=True, cwd=folder, capture_output=True, text=True, check=True
        )
        entry = json.loads(done.stdout)
        assert (entry["version"], shlex.split(line)[0]) == (version, "curl")
        body = {"lora_name": "from-disk", "lora_path": str(folder)}
        assert server.post("/v1/load_lora_adapter", body).status_code == 200
        same = server.get("/v1/adapters/from-disk").json()
        assert same["digest"] == entry["digest"]
        assert tokens(complete(server, "uploaded", PROMPT, 8)) == tokens(
            complete(server, "from-disk", PROMPT, 8)
        )
        unload(server, "from-disk")
    unload(server, "uploaded")
    wait_for(lambda: not any(Path(v["path"]).exists() for v in entry["versions"]))


def test_a_connection_that_ends_in_the_middle_changes_nothing(
    server: Server, folders: list[Path]
) -> None:
    weights = (folders[0] / "adapter_model.safetensors").read_bytes()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"PUT /v1/adapters/cut HTTP/1.1\r\nHost: localhost\r\n")
        connection.sendall(b"Content-Length: %d\r\n\r\n" % len(weights))
        connection.sendall(weights[: len(weights) // 2])
    url = f"{server.url}/v1/adapters/cut"
    assert httpx.get(url).status_code == 404
    damaged = httpx.put(url, content=weights[:-1], timeout=60)
    assert damaged.status_code == 400
    assert httpx.get(url).status_code == 404


def test_the_callback_in_the_docs_serves_a_model_as_it_is_trained(server: Server) -> None:
    names: dict[str, Any] = {}
    exec(block("python", "TrainerCallback"), names)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.bfloat16)
    targets = ["q_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    callback = names["PostAdapter"](server.url, "trained", every=2)
    answers = []
    for step in range(1, 5):
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                if "lora_B" in name:
                    tensor.mul_(1.5)
        state = SimpleNamespace(global_step=step, is_world_process_zero=True)
        callback.on_step_end(None, state, None, model=model)
        if step % 2 == 0:
            assert server.get("/v1/adapters/trained").json()["version"] == step // 2
            answers.append(tokens(complete(server, "trained", PROMPT, 8)))
    assert answers[0] != answers[1]
    unload(server, "trained")
