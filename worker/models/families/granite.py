"""Granite 3, dense (transformers.models.granite): Llama with four multipliers."""

from dataclasses import replace

from worker.model_config import ModelConfig
from worker.models.config_file import ConfigFile, dense_config, multiplier
from worker.models.family import Family


class GraniteFile(ConfigFile):
    """`config.json` as written, of Granite's other families as well."""

    attention_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0


def with_multipliers(config: ModelConfig, file: GraniteFile) -> ModelConfig:
    """Return the shape of a model with the multipliers of its file.

    Raises:
        ValueError: if one is not a number above 0.
    """
    return replace(
        config,
        attention_scale=multiplier("attention_multiplier", file.attention_multiplier),
        embedding_multiplier=multiplier("embedding_multiplier", file.embedding_multiplier),
        logits_scaling=multiplier("logits_scaling", file.logits_scaling),
        residual_multiplier=multiplier("residual_multiplier", file.residual_multiplier),
    )


def _read(file: GraniteFile) -> ModelConfig:
    bias = file.attention_bias
    config = dense_config(file, qkv_bias=bias, o_bias=bias, mlp_bias=file.mlp_bias)
    return with_multipliers(config, file)


FAMILY = Family(name="granite", causal_lm="GraniteForCausalLM", file=GraniteFile, read=_read)
