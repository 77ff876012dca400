"""The language model of a checkpoint with a vision tower, which is left alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from tests.worker.group import random_tokens
from tests.worker.logit_ranks import LogitRanks
from tests.worker.models.families.tiny import tiny_family
from tests.worker.peft_adapters import TOLERANCE, error
from tests.worker.quantization.packing import FORMATS, quantize_checkpoint
from worker.model_config_reader import read_model_config
from worker.weights.checkpoint_files import check_checkpoint


def gemma3() -> PreTrainedModel:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = tiny_family("gemma3").config.to_dict()
    ids = {"image_token_index": 130, "boi_token_index": 129, "eoi_token_index": 128}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **ids)
    return Gemma3ForConditionalGeneration(config)


def qwen3_5() -> PreTrainedModel:
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 72,
        "num_position_embeddings": 16,
    }
    text = tiny_family("qwen3_5").config.to_dict()
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))


def qwen3_5_moe() -> PreTrainedModel:
    text = tiny_family("qwen3_5_moe").config.to_dict()
    vision = qwen3_5().config.vision_config.to_dict() | {"model_type": "qwen3_5_moe_vision"}
    model = Qwen3_5MoeForConditionalGeneration(
        Qwen3_5MoeConfig(text_config=text, vision_config=vision)
    )
    model.set_experts_implementation("eager")  # others want widths that divide by 4
    return model


@pytest.mark.parametrize("build", [gemma3, qwen3_5, qwen3_5_moe])
@pytest.mark.parametrize("tp", [1, 2])
def test_logits_are_those_of_the_whole_model_asked_for_text(
    build: Callable[[], PreTrainedModel], tp: int, tmp_path: Path
) -> None:
    torch.manual_seed(7)
    model = build().eval()
    model.save_pretrained(tmp_path)
    tokens = tuple(token % 120 for token in random_tokens(40, 3))  # none stands for an image
    group = LogitRanks(tmp_path, tp, torch.float32)
    try:
        assert group.config.is_multimodal
        (found,) = group.logits([(None, tokens)])
    finally:
        group.close()
    with torch.inference_mode():
        right = model(torch.tensor([tokens])).logits[0]
    assert error(found, right) < TOLERANCE[torch.float32]


ROOTS = {
    "as transformers 5 writes it": ("model.language_model.", "model.visual.", "lm_head."),
    "as before": ("language_model.model.", "vision_tower.", "language_model.lm_head."),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    qwen3_5().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("roots", ROOTS.values(), ids=list(ROOTS))
def test_tensors_are_known_by_all_their_names(saved: Path, roots: tuple[str, ...]) -> None:
    standard = next(iter(ROOTS.values()))
    tensors = {}
    for name, tensor in load_file(saved / "model.safetensors").items():
        at = next(at for at, root in enumerate(standard) if name.startswith(root))
        tensors[roots[at] + name.removeprefix(standard[at])] = tensor
    tensors["mtp.fc.weight"] = torch.zeros(2, 2)  # a head that drafts, which is not used
    save_file(tensors, saved / "model.safetensors")
    check_checkpoint(saved, read_model_config(saved))
    tensors["language.fc.weight"] = torch.zeros(2, 2)
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(ValueError, match=r"unknown tensors: language\.fc\.weight"):
        check_checkpoint(saved, read_model_config(saved))


def test_linears_that_are_not_quantized_may_be_named_as_in_the_file(saved: Path) -> None:
    module = "model.language_model.layers.0.linear_attn.in_proj_b"
    plain = load_file(saved / "model.safetensors")
    config, quantize = FORMATS["fp8 in blocks"]
    quantize_checkpoint(saved, config | {"modules_to_not_convert": [module]}, quantize)
    tensors = load_file(saved / "model.safetensors")
    with pytest.raises(ValueError, match=r"in_proj_b.weight is of type F8_E4M3"):
        check_checkpoint(saved, read_model_config(saved))
    del tensors[f"{module}.weight_scale_inv"]
    tensors[f"{module}.weight"] = plain[f"{module}.weight"]
    save_file(tensors, saved / "model.safetensors")
    check_checkpoint(saved, read_model_config(saved))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"text_config": None}, "text_config is missing"),
        ({"text_config": []}, "text_config is missing"),
        ({"text_config": {}}, "hidden_size"),
        (
            {"quantization_config": {"bits": 4}},
            "quantization_config: Object missing required field",
        ),
    ],
)
def test_what_is_not_understood_is_refused(
    saved: Path, changes: dict[str, Any], complaint: str
) -> None:
    path = saved / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=complaint):
        read_model_config(saved)
