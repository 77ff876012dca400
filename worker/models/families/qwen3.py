"""Qwen3, dense (transformers.models.qwen3): each head of Q and K is normed."""

from worker.model_config import ModelConfig
from worker.models.config_file import ConfigFile, dense_config, with_window
from worker.models.family import Family


class _File(ConfigFile):
    """`config.json` as written."""

    sliding_window: int | None = 4096


def _read(file: _File) -> ModelConfig:
    bias = file.attention_bias
    config = dense_config(file, head_dim=128, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return with_window(config, file, slides=lambda layer: layer >= file.max_window_layers)


FAMILY = Family(
    name="qwen3",
    causal_lm="Qwen3ForCausalLM",
    classifier="Qwen3ForSequenceClassification",
    file=_File,
    read=_read,
)
