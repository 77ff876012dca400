"""OLMo 2 (transformers.models.olmo2): norms behind blocks, and of all heads of Q and K together."""

from dataclasses import replace

from worker.model_config import LayerNorms, ModelConfig
from worker.models.config_file import ConfigFile, dense_config
from worker.models.family import Family

BEHIND_BLOCKS = LayerNorms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


class _File(ConfigFile):
    """`config.json` as written."""

    rms_norm_eps: float = 1e-5


def _read(file: _File) -> ModelConfig:
    bias = file.attention_bias
    config = dense_config(file, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return replace(config, norms=BEHIND_BLOCKS, qk_norm_is_wide=True)


FAMILY = Family(
    name="olmo2",
    causal_lm="Olmo2ForCausalLM",
    classifier="Olmo2ForSequenceClassification",
    file=_File,
    read=_read,
)
