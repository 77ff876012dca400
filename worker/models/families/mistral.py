"""Mistral 7B and its successors, dense (transformers.models.mistral): a window in all layers."""

from worker.model_config import ModelConfig
from worker.models.config_file import ConfigFile, dense_config, with_window
from worker.models.family import Family


class _File(ConfigFile):
    """`config.json` as written."""

    sliding_window: int | None = 4096
    use_sliding_window: bool = True


def _read(file: _File) -> ModelConfig:
    return with_window(dense_config(file), file, slides=lambda _: True)


FAMILY = Family(
    name="mistral",
    causal_lm="MistralForCausalLM",
    classifier="MistralForSequenceClassification",
    file=_File,
    read=_read,
)
