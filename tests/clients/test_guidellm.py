"""GuideLLM against a served model: all its calls succeed, and have the asked length."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import CLIENTS_DIR
from tests.end_to_end.asking import Endpoint
from tests.end_to_end.server import MODELS

NUM_REQUESTS, NUM_TOKENS = 8, 16
TEXTS = f"kind=synthetic_text,prompt_tokens=64,output_tokens={NUM_TOKENS}"


def benchmark(
    server: Endpoint, model_dir: Path, place: Path, model: str, route: str, data: str
) -> dict[str, Any]:
    """Run it with four streams at once and return its requests by how they ended."""
    output = place / "benchmarks.json"
    backend = f"kind=openai_http,target={server.url},model={model},request_format={route}"
    command = [CLIENTS_DIR / "guidellm" / "bin" / "guidellm", "run", "--backend", backend]
    command += ["--profile", "kind=concurrent,streams=4", "--data", data]
    command += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={model_dir}"]
    command += ["--output", f"kind=json,path={output}", "--disable-console-interactive"]
    alone = {**os.environ, "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    ran = subprocess.run(command, cwd=place, env=alone, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (found,) = json.loads(output.read_text())["benchmarks"]
    requests: dict[str, Any] = found["requests"]
    return requests


@pytest.mark.parametrize(
    ("route", "model"),
    [
        ("/v1/completions", MODELS[0]),
        ("/v1/completions", MODELS[1]),
        ("/v1/chat/completions", MODELS[1]),
        ("/v1/responses", MODELS[0]),
    ],
)
def test_all_calls_succeed(
    server: Endpoint, model_dir: Path, tmp_path: Path, route: str, model: str
) -> None:
    requests = benchmark(server, model_dir, tmp_path, model, route, TEXTS)
    assert len(requests["successful"]) == NUM_REQUESTS
    assert not requests["errored"]
    assert not requests["incomplete"]
    for one in requests["successful"]:
        assert one["output_metrics"]["text_tokens"] == NUM_TOKENS
