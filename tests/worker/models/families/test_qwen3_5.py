"""Qwen3.5, most of whose layers have a gated delta net, and the others a gate behind attention."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from tests.worker.models.families.battery import HybridBattery
from worker.model_config import ModelConfig
from worker.model_config_reader import read_model_config


class TestQwen35(HybridBattery):
    """See `HybridBattery`."""

    adapter = "little on all linears"

    @staticmethod
    def build() -> Qwen3_5ForCausalLM:
        """Return a tiny model."""
        return Qwen3_5ForCausalLM(
            Qwen3_5TextConfig(
                vocab_size=131,
                hidden_size=72,
                intermediate_size=120,
                num_hidden_layers=5,
                num_attention_heads=6,
                num_key_value_heads=3,
                head_dim=32,
                layer_types=[
                    *("linear_attention", "linear_attention", "full_attention"),
                    *("linear_attention", "full_attention"),
                ],
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

    @staticmethod
    def distribution(key: str) -> tuple[float, float]:
        """Return that of weights which are small, for recurrences add up how they are rounded.

        With those of other families transformers' own logits in bfloat16 are off by 5e-2.
        """
        if "norm" in key:  # what is stored is w of 1 + w, but behind the delta net
            return (1.0 if "linear_attn" in key else 0.0), 0.2
        return 0.0, 0.04


def read(folder: Path, **changes: Any) -> ModelConfig:
    """Return what is read of a file as a small Qwen3.5's, of four layers."""
    file: dict[str, Any] = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262_144,
        "num_attention_heads": 8,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
        },
        "tie_word_embeddings": True,
        "vocab_size": 248_320,
    }
    (folder / "config.json").write_text(json.dumps(file | changes))
    return read_model_config(folder)


def test_a_published_file_is_read(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.mixer_layers == (0, 1, 2)
    assert config.rope.rotary_dim(config.head_dim) == 64
    assert [one.path for one in config.linears_of(3)] == [
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "self_attn.o_proj", "mlp.down_proj"),
    ]
    assert [one.path for one in config.linears_of(0)] == [
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        *("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        *("linear_attn.in_proj_b", "linear_attn.in_proj_a", "linear_attn.out_proj"),
    ]
    assert read(tmp_path, layer_types=["full_attention"] * 4).mixer is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"layer_types": ["linear_attention", "conv"] * 2}, "layer_types conv"),
        ({"layer_types": ["linear_attention"] * 4}, "no layer attends"),
        ({"full_attention_interval": 0}, "full_attention_interval 0"),
        ({"full_attention_interval": 5}, "no layer attends"),
        ({"linear_num_value_heads": 24}, "24 is not a multiple of linear_num_key_heads 16"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads 0"),
        ({"linear_value_head_dim": -1}, "linear_value_head_dim -1"),
        ({"linear_conv_kernel_dim": 2**40}, "linear_conv_kernel_dim is over"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.005}}, "partial_rotary_factor 0.005"),
        ({"attn_output_gate": False}, "attn_output_gate false"),
        ({"num_experts": 8}, "num_experts is not supported"),
        ({"num_hidden_layers": 2**60}, "num_hidden_layers is over"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(tmp_path, **changes)
