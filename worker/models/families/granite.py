"""Granite 3, dense (transformers.models.granite): Llama with four multipliers."""

from dataclasses import replace

from worker.model_config import ModelConfig
from worker.models.config_file import ConfigFile, dense_config, multiplier
from worker.models.family import Family


class _File(ConfigFile):
    """`config.json` as written."""

    attention_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0


def _read(file: _File) -> ModelConfig:
    bias = file.attention_bias
    return replace(
        dense_config(file, qkv_bias=bias, o_bias=bias, mlp_bias=file.mlp_bias),
        attention_scale=multiplier("attention_multiplier", file.attention_multiplier),
        embedding_multiplier=multiplier("embedding_multiplier", file.embedding_multiplier),
        logits_scaling=multiplier("logits_scaling", file.logits_scaling),
        residual_multiplier=multiplier("residual_multiplier", file.residual_multiplier),
    )


FAMILY = Family(name="granite", causal_lm="GraniteForCausalLM", file=_File, read=_read)
