"""Models of other families for all that are measured: random weights, the demo model's tokenizer.

Owns their shapes, of sizes that two cores serve, and their directory. The weights are drawn from a
seed, so that they are the same on every machine with the same torch.
"""

import shutil
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Lfm2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from tests.bench.peers.environments import PEERS_DIR

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


class Model(StrEnum):
    """What can be served."""

    DEMO = "demo"
    DENSE = "smollm3"  # 176 million weights
    EXPERTS = "qwen3-moe"  # 397 million, of which a token uses 99 million
    HYBRID = "lfm2"  # 184 million; 10 layers have a short convolution, 6 attend
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
        model = AutoModelForCausalLM.from_config(random_config(kind)).to(torch.bfloat16)
        half = target.with_suffix(".half")
        model.save_pretrained(half)
        for name in TOKENIZER:
            if (demo / name).exists():
                shutil.copy(demo / name, half)
        half.rename(target)
    return target


def random_config(kind: Model) -> PretrainedConfig:
    """Return a model's configuration; the demo model has none here."""
    return _CONFIGS[kind]()


def _dense() -> PretrainedConfig:
    return _sized(SmolLM3Config, intermediate_size=3072, num_hidden_layers=16)


def _experts() -> PretrainedConfig:
    return _sized(
        Qwen3MoeConfig,
        num_hidden_layers=12,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=384,
        norm_topk_prob=True,
    )


def _hybrid() -> PretrainedConfig:
    convolutions, attention = ["conv"], ["full_attention"]
    return _sized(
        Lfm2Config,
        intermediate_size=3072,
        block_auto_adjust_ff_dim=False,  # so wide, not two thirds of that
        num_hidden_layers=16,
        layer_types=[*(convolutions * 2 + attention) * 4, *(convolutions + attention) * 2],
    )


def _billion() -> PretrainedConfig:
    return _sized(
        LlamaConfig,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
    )


_CONFIGS = {
    Model.DENSE: _dense,
    Model.EXPERTS: _experts,
    Model.HYBRID: _hybrid,
    Model.BILLION: _billion,
}


def _sized(kind: type[PretrainedConfig], **sizes: Any) -> PretrainedConfig:
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
