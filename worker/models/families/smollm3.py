"""SmolLM3 (transformers.models.smollm3): some layers, as a rule each fourth, do not rotate."""

from dataclasses import replace

from worker.model_config import ModelConfig
from worker.models.config_file import (
    ConfigFile,
    dense_config,
    positive,
    require,
    with_window,
)
from worker.models.family import Family


class _File(ConfigFile):
    """`config.json` as written."""

    num_key_value_heads: int | None = 4
    rope_theta: float | None = 2_000_000.0
    tie_word_embeddings: bool = True
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 4


def _read(file: _File) -> ModelConfig:
    bias = file.attention_bias
    config = dense_config(file, qkv_bias=bias, o_bias=bias, mlp_bias=file.mlp_bias)
    nope = tuple(layer for layer, is_rotated in enumerate(_rotated(file)) if not is_rotated)
    return with_window(replace(config, nope_layers=nope), file, slides=lambda layer: layer in nope)


def _rotated(file: _File) -> list[bool]:
    """Return of each layer whether it rotates: the key says 1 where one does, despite its name."""
    if file.no_rope_layers is None:
        interval = positive("no_rope_layer_interval", file.no_rope_layer_interval)
        return [(layer + 1) % interval != 0 for layer in range(file.num_hidden_layers)]
    flags, num_layers = file.no_rope_layers, file.num_hidden_layers
    require(len(flags) >= num_layers, f"no_rope_layers has {len(flags)} flags, not {num_layers}")
    return [bool(flag) for flag in flags[:num_layers]]


FAMILY = Family(
    name="smollm3",
    causal_lm="SmolLM3ForCausalLM",
    classifier="SmolLM3ForSequenceClassification",
    file=_File,
    read=_read,
)
