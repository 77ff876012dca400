"""Granite 4 H without experts, most of whose layers have a Mamba-2 mixer."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from tests.worker.models.families.battery import HybridBattery
from worker.model_config import ModelConfig
from worker.model_config_reader import read_model_config


class TestGranitemoehybrid(HybridBattery):
    """See `HybridBattery`."""

    adapter = "rank 8 on all linears"

    @staticmethod
    def build() -> GraniteMoeHybridForCausalLM:
        """Return a tiny model."""
        return GraniteMoeHybridForCausalLM(
            GraniteMoeHybridConfig(
                vocab_size=131,
                hidden_size=96,
                shared_intermediate_size=120,
                num_hidden_layers=5,
                num_attention_heads=6,
                num_key_value_heads=3,
                num_local_experts=0,
                num_experts_per_tok=0,
                layer_types=["mamba", "mamba", "attention", "mamba", "attention"],
                mamba_n_heads=6,
                mamba_d_head=32,
                mamba_d_state=24,
                mamba_chunk_size=8,
                position_embedding_type="nope",
                attention_multiplier=0.1,
                embedding_multiplier=6.0,
                logits_scaling=0.3,
                residual_multiplier=0.3,
                max_position_embeddings=512,
                bos_token_id=None,
                eos_token_id=None,
                pad_token_id=None,
            )
        )


def read(folder: Path, **changes: Any) -> ModelConfig:
    """Return what is read of a file as Granite 4.0 H 350M's, of four layers."""
    file: dict[str, Any] = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "logits_scaling": 3,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 48,
        "mamba_proj_bias": False,
        "max_position_embeddings": 32_768,
        "num_attention_heads": 12,
        "num_experts_per_tok": 0,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.246,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000,
        "shared_intermediate_size": 2048,
        "tie_word_embeddings": True,
        "vocab_size": 100_352,
    }
    (folder / "config.json").write_text(json.dumps(file | changes))
    return read_model_config(folder)


def test_a_published_file_is_read(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.mixer_layers == (0, 1, 3) and config.nope_layers == (2,)
    assert [one.path for one in config.linears_of(0)] == [
        *("mamba.in_proj", "mamba.out_proj"),
        *("shared_mlp.input_linear", "shared_mlp.output_linear"),
    ]
    assert read(tmp_path, position_embedding_type="rope").nope_layers == ()
    assert read(tmp_path, layer_types=["attention"] * 4).mixer is None
    assert read(tmp_path, mamba_d_head="auto") == config


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"layer_types": ["mamba", "conv", "mamba", "attention"]}, "layer_types conv"),
        ({"layer_types": None}, "layer_types has 0 entries, not 4"),
        ({"layer_types": ["mamba"] * 4}, "no layer attends"),
        ({"num_local_experts": 64}, "num_experts_per_tok 0"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type 'alibi'"),
        ({"mamba_n_groups": 2}, "mamba_n_groups 2"),
        ({"mamba_n_heads": 0}, "mamba_n_heads 0"),
        ({"mamba_expand": 2**70}, "mamba_expand is over"),
        ({"mamba_d_head": 33}, "mamba_d_head 33 is not mamba_expand times hidden_size, 1536"),
        ({"mamba_d_head": "wide"}, "mamba_d_head wide is not"),
        ({"mamba_d_state": -1}, "mamba_d_state -1"),
        ({"mamba_d_conv": 0}, "mamba_d_conv 0"),
        ({"time_step_limit": [0.1]}, "time_step_limit"),
        ({"time_step_limit": [0.5, 0.1]}, "time_step_limit"),
        ({"time_step_limit": [0.1, {"__float__": "NaN"}]}, "time_step_limit"),
        ({"residual_multiplier": 0}, "residual_multiplier 0"),
        ({"num_hidden_layers": 2**60}, "num_hidden_layers is over"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(tmp_path, **changes)
