"""Llama 2 and 3 and what is made like them, such as SmolLM2 (transformers.models.llama)."""

from worker.model_config import ModelConfig
from worker.models.config_file import ConfigFile, dense_config, require
from worker.models.family import Family


def _read(file: ConfigFile) -> ModelConfig:
    window = file.sliding_window
    require(window is None, f"sliding_window {window} is not known to LlamaForCausalLM")
    bias = file.attention_bias
    return dense_config(file, qkv_bias=bias, o_bias=bias, mlp_bias=file.mlp_bias)


FAMILY = Family(
    name="llama",
    causal_lm="LlamaForCausalLM",
    classifier="LlamaForSequenceClassification",
    file=ConfigFile,
    read=_read,
)
