"""Granite 4 H whose layers have experts beside an MLP."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from tests.worker.models.families.battery import HybridBattery
from worker.model_config import ModelConfig
from worker.model_config_reader import read_model_config


class TestGranitemoehybridSparse(HybridBattery):
    """See `HybridBattery`."""

    is_quick = False
    adapter = "all linears, experts and router of a block"
    seed = 357  # whose choice of experts hangs on no rounding: their logits are 0.026 apart

    @staticmethod
    def build() -> GraniteMoeHybridForCausalLM:
        """Return a tiny model."""
        model = GraniteMoeHybridForCausalLM(
            GraniteMoeHybridConfig(
                vocab_size=131,
                hidden_size=96,
                intermediate_size=41,
                shared_intermediate_size=120,
                num_hidden_layers=3,
                num_attention_heads=6,
                num_key_value_heads=3,
                num_local_experts=5,
                num_experts_per_tok=2,
                layer_types=["mamba", "attention", "mamba"],
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
        model.set_experts_implementation("eager")  # others want widths that divide by 4
        return model


def read(folder: Path, **changes: Any) -> ModelConfig:
    """Return what is read of a file as Granite 4.0 H Tiny's, of four layers."""
    file: dict[str, Any] = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "attention_bias": False,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12,
        "hidden_size": 1536,
        "intermediate_size": 512,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "logits_scaling": 6,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_heads": 48,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 12,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "num_local_experts": 64,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-5,
        "shared_intermediate_size": 1024,
        "tie_word_embeddings": True,
        "vocab_size": 100_352,
    }
    (folder / "config.json").write_text(json.dumps(file | changes))
    return read_model_config(folder)


def test_a_published_file_is_read(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.intermediate_size == 1024 and config.mixer_layers == (0, 1, 3)
    experts = config.experts
    assert experts is not None and experts.layers == (0, 1, 2, 3) and experts.renormalize
    assert (experts.num_experts, experts.top_k, experts.intermediate_size) == (64, 6, 512)
    assert [one.path for one in config.linears_of(0)][:6] == [
        *("mamba.in_proj", "mamba.out_proj"),
        *("shared_mlp.input_linear", "shared_mlp.output_linear"),
        *("block_sparse_moe.router.layer", "block_sparse_moe.experts.0.gate_proj"),
    ]
    assert len(config.linears_of(2)) == 4 + 2 + 1 + 3 * 64
    attending = read(tmp_path, layer_types=["attention"] * 4)
    assert attending.mixer is None and attending.experts == experts


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_local_experts": 4}, "num_experts_per_tok 6 is over 4 experts"),
        ({"num_local_experts": -1}, "num_experts -1"),
        ({"num_local_experts": 2**60}, "num_experts is over 4096"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok 0"),
        ({"intermediate_size": 0}, "intermediate_size 0"),
        ({"shared_intermediate_size": 0}, "shared_intermediate_size 0"),
    ],
)
def test_experts_that_cannot_be_computed_are_refused_by_their_key(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(tmp_path, **changes)
