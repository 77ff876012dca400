"""`topwork check --quality` tells how far what is served is from float32, and nothing else."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from cluster.request import BASE
from cluster.router.tokenizer import Tokenizer
from deploy.cli.quality import report
from deploy.config import ConfigError, ServeConfig
from deploy.engine_config import Checked, check_model
from deploy.machine import Machine
from deploy.quality import measure as measuring
from deploy.quality.distance import Distance
from deploy.quality.measure import SAMPLE, WINDOW, measure
from tests.deploy.checks.small_model import WEIGHTS, make_model
from tests.worker.peft_adapters import make_adapter_dir


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model of random weights."""
    keys = {"head_dim": 8, "max_position_embeddings": 512, "model_type": "llama"}
    path = make_model(tmp_path / "model", **keys)
    random = np.random.default_rng(1)
    tensors = load_file(path / WEIGHTS)
    drawn = {name: random.normal(0, 0.3, one.shape) for name, one in tensors.items()}
    save_file({name: one.astype(np.float32) for name, one in drawn.items()}, path / WEIGHTS)
    return path


def checked(model: Path, dtype: str = "bfloat16", **more: object) -> Checked:
    config = {"model": str(model), "dtype": dtype, "tp": 2, "kv_cache_memory": 2**24}
    return check_model(ServeConfig.model_validate(config | more))


def text_of(folder: Path, num_characters: int) -> str:
    """Write a text of so many tokens, one for each character."""
    (folder / "text").write_text(("some words of no sense, " * 99)[:num_characters])
    return str(folder / "text")


def test_a_distance_is_torchs_of_all_positions_together() -> None:
    generator = torch.Generator().manual_seed(3)
    served, reference = (torch.randn(50, 300, generator=generator) * 3 for _ in range(2))
    distance = Distance()
    distance.add(served[:20], reference[:20])
    distance.add(served[20:], reference[20:])
    logs = (one.double().log_softmax(1) for one in (served, reference))
    each = F.kl_div(*logs, reduction="none", log_target=True).sum(1)
    assert distance.num_positions == 50
    assert distance.mean == pytest.approx(float(each.mean()), rel=1e-12)
    assert distance.largest == pytest.approx(float(each.max()), rel=1e-12)
    same = (served.argmax(1) == reference.argmax(1)).double().mean()
    assert distance.agreement == pytest.approx(float(same))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_bfloat16_is_some_way_off_float32_which_is_none_of_itself(
    model: Path, tmp_path: Path
) -> None:
    make_adapter_dir(AutoModelForCausalLM.from_pretrained(model), "rank 8 on every linear",
                     tmp_path / "adapter")  # fmt: skip
    text = text_of(tmp_path, 2 * WINDOW + 30)
    adapters = [("mine", str(tmp_path / "adapter"))]
    said: list[str] = []
    for dtype, is_off in (("float32", False), ("bfloat16", True)):
        base, mine = measure(checked(model, dtype), text, adapters, said.append)
        assert (base.model, mine.model) == ("model", "mine")
        for one in (base.distance, mine.distance):
            assert one.num_positions == 2 * (WINDOW - 1) + 29
            assert (0 < one.mean < one.largest < 0.1) if is_off else one.largest < 1e-9
            assert is_off or one.agreement == 1.0
        assert base.distance.mean != mine.distance.mean or not is_off
    assert "mine: part 3 of 3 of the text" in said


def test_the_logits_that_are_compared_are_those_of_the_models_next_tokens(model: Path) -> None:
    rank = measuring._served(checked(model, "float32"))
    reader = measuring._Reader(rank, checked(model, "float32"))
    tokens = Tokenizer.load(model).encode("a text of a few tokens", add_special_tokens=True)
    try:
        found = reader.logits(BASE, tokens)
    finally:
        reader.close()
    with torch.inference_mode():
        reference = AutoModelForCausalLM.from_pretrained(model)
        right = reference(torch.tensor([tokens])).logits[0, :-1]
    assert torch.allclose(found, right, atol=1e-4)


def test_the_reference_is_in_float32_whatever_is_served(model: Path) -> None:
    of_fewer_bits = {"kv_cache_dtype": "int8", "lora_dtype": "int8"}
    rank = replace(measuring._served(checked(model, **of_fewer_bits)), deterministic=True)
    reference = measuring._reference(rank)
    assert (rank.dtype, rank.tp, reference.dtype) == ("bfloat16", 1, "float32")
    same = {"dtype": "bfloat16", "deterministic": True, "kv_memory_bytes": rank.kv_memory_bytes}
    assert replace(reference, **same, **of_fewer_bits) == rank  # type: ignore[arg-type]


def test_what_is_found_is_printed_as_json(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(checked(model), text_of(tmp_path, 40), as_json=True)
    (entry,) = (found := json.loads(capsys.readouterr().out))["quality"]
    assert (found["dtype"], found["quantization"]) == ("bfloat16", None)
    assert (found["kv_cache_dtype"], found["lora_dtype"]) == ("auto", "auto")
    assert entry.keys() == {"model", "positions", "kl_mean", "kl_max", "greedy_agreement"}
    assert (entry["model"], entry["positions"]) == ("model", 39)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("x", "has 1 tokens: two are needed"), (b"\xff\xfe", "utf-8"), (None, "No such file")],
)
def test_a_text_that_cannot_be_read_is_refused(
    model: Path, tmp_path: Path, text: str | bytes | None, complaint: str
) -> None:
    path = tmp_path / "text"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=f"quality: .*{complaint}"):
        measure(checked(model), str(path), (), lambda _: None)


@pytest.mark.parametrize(("quantization", "told"), [(None, "bfloat16"), ("int4", "int4")])
def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None, told: str
) -> None:
    asked = checked(model, quantization=quantization)
    small = Machine(memory=2**10, free_memory=2**10, shared_memory=None, gpu_memory=())
    monkeypatch.setattr(Machine, "here", lambda: small)
    with pytest.raises(ConfigError, match=f"quality: the model in {told} and in float32 takes"):
        measure(asked, SAMPLE, (), lambda _: None)
