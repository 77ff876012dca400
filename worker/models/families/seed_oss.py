"""Seed-OSS (transformers.models.seed_oss): Llama whose Q, K and V have biases."""

from worker.model_config import ModelConfig
from worker.models.config_file import ConfigFile, dense_config
from worker.models.family import Family


class _File(ConfigFile):
    """`config.json` as written."""

    attention_bias: bool = True
    attention_out_bias: bool = False
    num_key_value_heads: int | None = 8


def _read(file: _File) -> ModelConfig:
    return dense_config(
        file,
        head_dim=128,
        qkv_bias=file.attention_bias,
        o_bias=file.attention_out_bias,
        mlp_bias=file.mlp_bias,
    )


FAMILY = Family(
    name="seed_oss",
    causal_lm="SeedOssForCausalLM",
    classifier="SeedOssForSequenceClassification",
    file=_File,
    read=_read,
)
