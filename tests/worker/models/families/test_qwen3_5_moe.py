"""Qwen3.5, sparse: gated delta nets or attention, and experts beside an MLP with a gate."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from tests.worker.models.families.battery import HybridBattery
from worker.model_config import ModelConfig
from worker.model_config_reader import read_model_config


class TestQwen35Moe(HybridBattery):
    """See `HybridBattery`."""

    adapter = "little on all linears, experts and router"
    seed = 830  # whose choice of experts hangs on no rounding: their logits are 0.025 apart

    @staticmethod
    def build() -> Qwen3_5MoeForCausalLM:
        """Return a tiny model."""
        model = Qwen3_5MoeForCausalLM(
            Qwen3_5MoeTextConfig(
                vocab_size=131,
                hidden_size=72,
                moe_intermediate_size=41,
                shared_expert_intermediate_size=61,
                num_experts=5,
                num_experts_per_tok=2,
                num_hidden_layers=3,
                num_attention_heads=6,
                num_key_value_heads=3,
                head_dim=32,
                layer_types=["linear_attention", "full_attention", "linear_attention"],
                linear_num_key_heads=3,
                linear_num_value_heads=6,
                linear_key_head_dim=16,
                linear_value_head_dim=24,
                max_position_embeddings=512,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 10_000.0,
                    "partial_rotary_factor": 0.25,
                    "mrope_section": [2, 1, 1],
                },
                bos_token_id=None,
                eos_token_id=None,
                pad_token_id=None,
            )
        )
        model.set_experts_implementation("eager")  # others want widths that divide by 4
        return model

    @staticmethod
    def distribution(key: str) -> tuple[float, float]:
        """Return that of weights which are small, as the dense models' are; not of routers."""
        if "norm" in key:  # what is stored is w of 1 + w, but behind the delta net
            return (1.0 if "linear_attn" in key else 0.0), 0.2
        return 0.0, (0.15 if "mlp.gate." in key else 0.04)


def read(folder: Path, **changes: Any) -> ModelConfig:
    """Return what is read of a file as Qwen3.5 35B A3B's, of four layers."""
    text: dict[str, Any] = {
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 2048,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "max_position_embeddings": 262_144,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
        },
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248_320,
    }
    name = "Qwen3_5MoeForConditionalGeneration"
    file = {"architectures": [name], "text_config": text | changes}
    (folder / "config.json").write_text(json.dumps(file))
    return read_model_config(folder)


def test_a_published_file_is_read(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.is_multimodal and config.mixer_layers == (0, 1, 2)
    experts = config.experts
    assert experts is not None and experts.layers == (0, 1, 2, 3)
    assert experts.renormalize and experts.has_shared_gate
    assert (experts.num_experts, experts.top_k, experts.intermediate_size) == (256, 8, 512)
    paths = [one.path for one in config.linears_of(3)]
    assert paths[3:10] == [
        *("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "self_attn.o_proj"),
        *("mlp.shared_expert.down_proj", "mlp.gate", "mlp.shared_expert_gate"),
        "mlp.experts.0.gate_proj",
    ]
    assert len(paths) == 4 + 3 + 2 + 3 * 256


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_experts": 7}, "num_experts_per_tok 8 is over 7 experts"),
        ({"num_experts": 0}, "num_experts 0"),
        ({"num_experts": 2**60}, "num_experts is over 4096"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size 0"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size 0"),
        ({"attn_output_gate": False}, "attn_output_gate false"),
        ({"n_shared_experts": 1}, "n_shared_experts is not supported"),
    ],
)
def test_experts_that_cannot_be_computed_are_refused_by_their_key(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(tmp_path, **changes)
