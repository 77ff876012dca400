"""Qwen3.5, dense, its text alone (transformers.models.qwen3_5): most layers have a gated delta net.

The others attend, with norms of Q and K, a gate behind attention, and heads that rotate in part.
"""

from dataclasses import replace

from worker.linears import mixer_linears, separate_linears
from worker.mixers.config import GatedDeltaConfig
from worker.model_config import ModelConfig, RopeConfig
from worker.models.config_file import (
    ConfigFile,
    RopeFile,
    dense_config,
    mixer_layers,
    positive,
    require,
    rotary_factor,
)
from worker.models.family import Family

_BLOCK = "linear_attn"
_IN_MODULES = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"


class HybridFile(ConfigFile):
    """`config.json` as written, of the family's sparse models as well."""

    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    full_attention_interval: int = 4
    attn_output_gate: bool = True


def read_hybrid(file: HybridFile) -> ModelConfig:
    """Return the shape of a model whose layers have an MLP.

    Raises:
        ValueError: naming the key that does not fit.
    """
    require(file.attn_output_gate, "attn_output_gate false is not supported")
    bias = file.attention_bias
    config = dense_config(file, head_dim=256, qk_norm=True, rope=_rope(file))
    layers = mixer_layers(
        _with_layer_types(file), mixing=("linear_attention",), attending=("full_attention",)
    )
    linears = [
        replace(one, in_layers="attention" if one.fused in ("qkv", "o") else "all")
        for one in separate_linears(qkv_bias=bias, o_bias=bias, gated_attention=True)
    ]
    config = replace(
        config,
        rope=replace(config.rope, rotary_factor=_rotary_factor(file, config.head_dim)),
        linears=tuple(linears),
        norm_offset=1.0,
        has_attention_gate=True,
    )
    if not layers:
        return config
    return replace(
        config,
        linears=(*linears, *mixer_linears(_BLOCK, _IN_MODULES, "out_proj")),
        mixer=_mixer(file),
        mixer_block=_BLOCK,
        mixer_layers=layers,
    )


def _with_layer_types(file: HybridFile) -> HybridFile:
    if file.layer_types is None:
        interval = positive("full_attention_interval", file.full_attention_interval)
        file.layer_types = [
            "linear_attention" if (layer + 1) % interval else "full_attention"
            for layer in range(file.num_hidden_layers)
        ]
    return file


def _mixer(file: HybridFile) -> GatedDeltaConfig:
    num_key_heads = positive("linear_num_key_heads", file.linear_num_key_heads)
    num_value_heads = positive("linear_num_value_heads", file.linear_num_value_heads)
    require(
        num_value_heads % num_key_heads == 0,
        f"linear_num_value_heads {num_value_heads} is not a multiple of linear_num_key_heads "
        f"{num_key_heads}",
    )
    return GatedDeltaConfig(
        num_key_heads=num_key_heads,
        key_dim=positive("linear_key_head_dim", file.linear_key_head_dim),
        num_value_heads=num_value_heads,
        value_dim=positive("linear_value_head_dim", file.linear_value_head_dim),
        num_taps=positive("linear_conv_kernel_dim", file.linear_conv_kernel_dim),
        norm_eps=file.rms_norm_eps,
    )


def _written_rope(file: HybridFile) -> RopeFile:
    return file.rope_parameters or file.rope_scaling or RopeFile()


def _rope(file: HybridFile) -> RopeConfig:
    """Return the rope of text, whose tokens have one position for all three of `mrope_section`."""
    written = _written_rope(file)
    kind = written.rope_type or written.type or "default"
    require(kind == "default", f"rope_type {kind!r} is not supported")
    theta = written.rope_theta or file.rope_theta or 10_000.0
    require(theta > 1, f"rope_theta {theta} is not above 1")
    return RopeConfig(theta=theta)


def _rotary_factor(file: HybridFile, head_dim: int) -> float:
    return rotary_factor(file, _written_rope(file), head_dim, default=0.25)


FAMILY = Family(
    name="qwen3_5",
    causal_lm="Qwen3_5ForCausalLM",
    classifier="Qwen3_5TextForSequenceClassification",
    multimodal="Qwen3_5ForConditionalGeneration",
    file=HybridFile,
    read=read_hybrid,
)
