"""NVIDIA's aiperf against a served model: all its calls succeed, and have the asked length."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.environments import CLIENTS_DIR
from tests.end_to_end.asking import Endpoint
from tests.end_to_end.server import MODELS

NUM_REQUESTS, NUM_TOKENS = 8, 16
COMMIT = "0" * 40


def hub_cache(model_dir: Path, place: Path) -> Path:
    """Return a cache of hub files with the model in it: aiperf takes no tokenizer by its path."""
    repository = place / "hub" / "models--topwork--smollm2"
    for name in ("refs", "snapshots"):
        (repository / name).mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "snapshots" / COMMIT).symlink_to(model_dir)
    return repository.parent


@pytest.mark.parametrize(
    ("endpoint", "model"),
    [
        ("chat", MODELS[1]),
        ("completions", MODELS[0]),
        ("responses", MODELS[0]),
        ("messages", MODELS[1]),
    ],
)
def test_all_calls_succeed(
    server: Endpoint, model_dir: Path, tmp_path: Path, endpoint: str, model: str
) -> None:
    command = [CLIENTS_DIR / "aiperf" / "bin" / "aiperf", "profile", "--model", model]
    command += ["--url", server.url, "--endpoint-type", endpoint, "--streaming"]
    command += ["--tokenizer", "topwork/smollm2", "--concurrency", "4", "--workers-max", "1"]
    command += ["--request-count", str(NUM_REQUESTS), "--synthetic-input-tokens-mean", "64"]
    command += ["--output-tokens-mean", str(NUM_TOKENS), "--extra-inputs", "ignore_eos:true"]
    command += ["--use-server-token-count", "--ui", "none", "--artifact-dir", tmp_path / "out"]
    cached = {**os.environ, "HF_HUB_CACHE": str(hub_cache(model_dir, tmp_path))}
    ran = subprocess.run(command, cwd=tmp_path, env=cached, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (file,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    result = json.loads(file.read_text())
    assert result["request_count"]["avg"] == NUM_REQUESTS
    assert not result.get("error_request_count")
    if endpoint != "responses":  # it counts tokens only of those that end by themselves
        assert result["output_sequence_length"]["avg"] == NUM_TOKENS
