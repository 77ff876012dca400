"""Qwen2, sparse: experts beside an MLP with a gate, whose weights do not add up to 1."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from tests.worker.group import random_tokens
from tests.worker.logit_ranks import LogitRanks
from tests.worker.models.families.battery import FamilyBattery, Made
from worker.model_config import ModelConfig
from worker.model_config_reader import read_model_config


class TestQwen2Moe(FamilyBattery):
    """See `FamilyBattery`."""

    is_quick = False
    adapter = "all linears, experts and router"
    seed = 923  # whose choice of experts hangs on no rounding: their logits are 0.029 apart

    @staticmethod
    def build() -> Qwen2MoeForCausalLM:
        """Return a tiny model."""
        config = Qwen2MoeConfig(
            vocab_size=131,
            hidden_size=64,
            intermediate_size=90,
            moe_intermediate_size=31,
            shared_expert_intermediate_size=55,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=16,
            max_position_embeddings=512,
            num_experts=5,
            num_experts_per_tok=2,
            norm_topk_prob=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = Qwen2MoeForCausalLM(config)
        model.set_experts_implementation("eager")  # others want widths that divide by 4
        return model

    @pytest.mark.parametrize("tp", [1, 3])
    def test_experts_in_stacks_are_those_that_lie_by_themselves(
        self, tiny: Made, tmp_path: Path, tp: int
    ) -> None:
        shutil.copy(tiny.path / "config.json", tmp_path)
        tensors = load_file(tiny.path / "model.safetensors")
        for layer in range(3):
            path = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([tensors.pop(f"{path}.{expert}.{name}.weight") for expert in range(5)])
                for name in ("gate_proj", "up_proj", "down_proj")
            )
            tensors[f"{path}.gate_up_proj"] = torch.cat((gate, up), dim=1)
            tensors[f"{path}.down_proj"] = down
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        found = []
        for model in (tiny.path, tmp_path):
            group = LogitRanks(model, tp)
            try:
                found += group.logits([(None, random_tokens(40, 1))])
            finally:
                group.close()
        assert torch.equal(*found)


def read(folder: Path, **changes: Any) -> ModelConfig:
    """Return what is read of a file as Qwen1.5 MoE A2.7B's, of four layers."""
    file: dict[str, Any] = {
        "architectures": ["Qwen2MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 3,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 16,
        "rope_theta": 1_000_000.0,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "vocab_size": 151_936,
    }
    (folder / "config.json").write_text(json.dumps(file | changes))
    return read_model_config(folder)


def test_a_published_file_is_read(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.intermediate_size == 5632 and config.sliding_window is None
    experts = config.experts
    assert experts is not None and experts.layers == (0, 1, 2, 3)
    assert experts.has_shared_gate and not experts.renormalize
    assert (experts.num_experts, experts.top_k, experts.intermediate_size) == (60, 4, 1408)
    assert [one.has_bias for one in config.linears_of(0)[:3]] == [True] * 3
    assert read(tmp_path, norm_topk_prob=True).experts != experts
    sliding = read(tmp_path, use_sliding_window=True)
    assert (sliding.sliding_window, sliding.sliding_layers) == (4096, (0, 2))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"mlp_only_layers": [1]}, "mlp_only_layers is not supported"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2 is not supported"),
        ({"num_experts": 3}, "num_experts_per_tok 4 is over 3 experts"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size 0"),
    ],
)
def test_experts_that_cannot_be_computed_are_refused_by_their_key(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(tmp_path, **changes)
