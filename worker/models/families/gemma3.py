"""Gemma 3, the text model (transformers.models.gemma3).

Norms before and behind each block whose weights are stored less 1, scaled embeddings, a gate of
GELU, and five layers in six that slide and rotate by a base frequency of their own.
"""

from dataclasses import replace

from worker.model_config import LayerNorms, ModelConfig
from worker.models.config_file import (
    ConfigFile,
    dense_config,
    positive,
    require,
    ropes_by_type,
    with_window,
)
from worker.models.family import Family


class _File(ConfigFile):
    """`config.json` as written."""

    # Files of multimodal models leave out what is as here.
    num_attention_heads: int = 8
    vocab_size: int = 262_208
    max_position_embeddings: int = 131_072
    num_key_value_heads: int | None = 4
    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: float = 256.0
    rope_local_base_freq: float = 10_000.0
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 6
    tie_word_embeddings: bool = True
    use_bidirectional_attention: bool | None = False
    use_sliding_window: bool = True


def _read(file: _File) -> ModelConfig:
    require(not file.use_bidirectional_attention, "use_bidirectional_attention is not supported")
    require(file.sliding_window is not None, "sliding_window is missing")
    scalar = file.query_pre_attn_scalar
    require(scalar > 0, f"query_pre_attn_scalar {scalar} is not above 0")
    full, sliding = ropes_by_type(
        file, full_theta=file.rope_theta or 1_000_000.0, sliding_theta=file.rope_local_base_freq
    )
    bias = file.attention_bias
    config = dense_config(
        file,
        head_dim=256,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        hidden_act=file.hidden_activation,
        rope=full,
    )
    config = replace(
        config,
        norms=LayerNorms(
            after_attention="post_attention_layernorm",
            before_mlp="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
        ),
        norm_offset=1.0,
        attention_scale=scalar**-0.5,
        embedding_multiplier=file.hidden_size**0.5,
        is_multiplier_rounded=True,
        sliding_rope=sliding,
    )
    pattern = positive("sliding_window_pattern", file.sliding_window_pattern)
    return with_window(config, file, slides=lambda layer: (layer + 1) % pattern != 0)


FAMILY = Family(
    name="gemma3",
    causal_lm="Gemma3ForCausalLM",
    classifier="Gemma3TextForSequenceClassification",
    multimodal="Gemma3ForConditionalGeneration",
    file=_File,
    read=_read,
)
