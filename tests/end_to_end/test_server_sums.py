"""Weighted sums of adapters through a served model, against one merged adapter that is the sum."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deploy.demo.many_adapters import CONFIG, WEIGHTS
from tests.end_to_end.asking import cached, complete, tokens
from tests.end_to_end.engines import random_prompt
from tests.end_to_end.server import Server, adapter_dirs

pytestmark = [pytest.mark.model, pytest.mark.ray]
PROMPT = random_prompt(140)  # two pages and a part
ADAPTER = "letter"


def ask(
    server: Server, lora: list[dict[str, object]] | None, model: str = "smollm2"
) -> dict[str, Any]:
    extra = {} if lora is None else {"lora": lora}
    return complete(server, model, PROMPT, 12, logprobs=0, **extra)


def logprobs(answer: dict[str, Any]) -> list[float]:
    found: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
    return found


def scaled_copy(name: str, factor: float, path: Path) -> Path:
    """Write an adapter whose B is that of another one times a factor."""
    source = adapter_dirs()[name]
    path.mkdir()
    (path / CONFIG).write_text((source / CONFIG).read_text())
    tensors: dict[str, torch.Tensor] = load_file(source / WEIGHTS)
    save_file({k: v * factor if ".lora_B." in k else v for k, v in tensors.items()}, path / WEIGHTS)
    return path


def test_halves_and_quarters_of_an_adapter_are_the_adapter(server: Server, tmp_path: Path) -> None:
    half = scaled_copy(ADAPTER, 0.5, tmp_path / "half")
    body = {"lora_name": "half", "lora_path": str(half)}
    assert server.post("/v1/load_lora_adapter", body).status_code == 200
    whole = ask(server, None, ADAPTER)
    twice = ask(server, [{"name": "half", "weight": 2}])  # powers of two: not a bit is lost
    assert (tokens(twice), logprobs(twice)) == (tokens(whole), logprobs(whole))
    both = ask(server, [{"name": "half", "weight": 1.5}, {"name": ADAPTER, "weight": 0.25}])
    assert tokens(both) == tokens(whole)
    body = {"lora_name": "half"}
    assert server.post("/v1/unload_lora_adapter", body).status_code == 200
    slots = server.get("/metrics").text
    assert "half" not in slots, "its sums went with it"


def test_a_sum_has_a_cache_of_its_own_whatever_its_order(server: Server) -> None:
    lora: list[dict[str, object]] = [{"name": "pirate", "weight": 0.7}, {"name": "oracle"}]
    ask(server, None, "pirate")
    ask(server, None)
    first = ask(server, lora)
    assert cached(first) == 0
    again = ask(server, lora[::-1])
    assert (cached(again), tokens(again)) == (128, tokens(first))
    assert cached(ask(server, [{"name": "pirate", "weight": 0.6}, {"name": "oracle"}])) == 0
    nothing = ask(server, [{"name": "pirate"}, {"name": "pirate", "weight": -1}])
    assert cached(nothing) == 128, "nothing on top of the base model is the base model"
