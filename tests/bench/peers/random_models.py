"""Models of other families for all that are measured: random weights, the demo model's tokenizer.

Owns their shapes, of sizes that two cores serve, and their directory. The weights are drawn from a
seed, so that they are the same on every machine with the same torch.
"""

import shutil
from enum import StrEnum
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tests.bench.peers.environments import PEERS_DIR

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


class Model(StrEnum):
    """What can be served."""

    DEMO = "demo"
    DENSE = "smollm3"  # 176 million weights
    EXPERTS = "qwen3-moe"  # 397 million, of which a token uses 99 million
    BILLION = "llama-1b"  # 1,074 million: Llama 3.2's shape at 1B with the demo model's tokens


def make_random_model(kind: Model, demo: Path, directory: Path = PEERS_DIR / "models") -> Path:
    """Return a model's directory; it is made if it is not there.

    Args:
        kind: not the demo model.
        demo: the demo model's directory.
        directory: of all that are made.
    """
    target = directory / kind
    if not (target / "config.json").exists():
        torch.manual_seed(0)
        model = _BUILT[kind]().to(torch.bfloat16)
        half = target.with_suffix(".half")
        model.save_pretrained(half)
        for name in TOKENIZER:
            if (demo / name).exists():
                shutil.copy(demo / name, half)
        half.rename(target)
    return target


def _dense() -> PreTrainedModel:
    return SmolLM3ForCausalLM(_sized(SmolLM3Config, intermediate_size=3072, num_hidden_layers=16))


def _experts() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(
        _sized(
            Qwen3MoeConfig,
            num_hidden_layers=12,
            head_dim=64,
            num_experts=32,
            num_experts_per_tok=4,
            moe_intermediate_size=384,
            norm_topk_prob=True,
        )
    )


def _billion() -> PreTrainedModel:
    return LlamaForCausalLM(
        _sized(
            LlamaConfig,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
        )
    )


_BUILT = {Model.DENSE: _dense, Model.EXPERTS: _experts, Model.BILLION: _billion}


def _sized(kind: type[PretrainedConfig], **sizes: int) -> PretrainedConfig:
    """Return a configuration of common sizes, and the tokens of the demo model."""
    common = {
        "vocab_size": 49152,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    return kind(**(common | sizes))
