"""LFM2, most of whose layers have a short convolution."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Lfm2Config, Lfm2ForCausalLM

from tests.worker.models.families.battery import HybridBattery
from worker.model_config import ModelConfig
from worker.model_config_reader import read_model_config


class TestLfm2(HybridBattery):
    """See `HybridBattery`."""

    adapter = "rank 8 on all linears"

    @staticmethod
    def build() -> Lfm2ForCausalLM:
        """Return a tiny model."""
        config = Lfm2Config(
            vocab_size=131,
            hidden_size=64,
            intermediate_size=120,
            block_multiple_of=16,
            num_hidden_layers=5,
            num_attention_heads=6,
            num_key_value_heads=3,
            layer_types=["conv", "conv", "full_attention", "conv", "full_attention"],
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        config.head_dim = 16
        return Lfm2ForCausalLM(config)


def read(folder: Path, **changes: Any) -> ModelConfig:
    """Return what is read of a file as LFM2-350M's was before transformers 5."""
    file: dict[str, Any] = {
        "architectures": ["Lfm2ForCausalLM"],
        "block_auto_adjust_ff_dim": True,
        "block_ff_dim": 6656,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "conv_bias": False,
        "full_attn_idxs": [2, 3],
        "hidden_size": 1024,
        "intermediate_size": 6656,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "num_attention_heads": 16,
        "num_hidden_layers": 4,
        "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0,
        "tie_embedding": False,
        "vocab_size": 65_536,
    }
    (folder / "config.json").write_text(json.dumps(file | changes))
    return read_model_config(folder)


def test_a_file_from_before_transformers_5_is_read(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.mixer_layers == (0, 1)
    assert config.intermediate_size == 4608
    assert config.rms_norm_eps == 1e-5 and not config.tie_word_embeddings
    assert [one.path for one in config.linears_of(0)] == [
        *("conv.in_proj", "conv.out_proj"),
        *("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
    ]
    assert [one.path for one in config.linears_of(2)][3] == "self_attn.out_proj"
    assert read(tmp_path, block_auto_adjust_ff_dim=False).intermediate_size == 6656
    assert read(tmp_path, full_attn_idxs=None).mixer is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"layer_types": ["conv", "mamba", "conv", "full_attention"]}, "layer_types mamba"),
        ({"layer_types": ["conv"]}, "layer_types has 1 entries, not 4"),
        ({"full_attn_idxs": []}, "no layer attends"),
        ({"conv_L_cache": 0}, "conv_L_cache 0"),
        ({"num_hidden_layers": 2**60}, "num_hidden_layers is over"),
        ({"num_hidden_layers": 0, "full_attn_idxs": None}, "num_hidden_layers"),
        ({"block_ffn_dim_multiplier": -1.0}, "block_ffn_dim_multiplier -1"),
        ({"block_ffn_dim_multiplier": 1e308}, "block_ffn_dim_multiplier 1e\\+308 is too large"),
        ({"num_experts": 8}, "num_experts is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(tmp_path, **changes)
