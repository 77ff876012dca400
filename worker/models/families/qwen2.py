"""Qwen2 and Qwen2.5 (transformers.models.qwen2): biases of Q, K and V."""

from worker.model_config import ModelConfig
from worker.models.config_file import ConfigFile, dense_config, with_window
from worker.models.family import Family


class _File(ConfigFile):
    """`config.json` as written."""

    sliding_window: int | None = 4096


def _read(file: _File) -> ModelConfig:
    config = dense_config(file, qkv_bias=True)
    return with_window(config, file, slides=lambda layer: layer >= file.max_window_layers)


FAMILY = Family(
    name="qwen2",
    causal_lm="Qwen2ForCausalLM",
    classifier="Qwen2ForSequenceClassification",
    file=_File,
    read=_read,
)
