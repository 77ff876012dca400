"""Phi-3, Phi-4 and Phi-4-mini (transformers.models.phi3): fused linears, LongRoPE.

Heads may rotate in part.
"""

from dataclasses import replace

from worker.linears import Linear
from worker.model_config import ModelConfig, RopeConfig
from worker.models.config_file import (
    ConfigFile,
    RopeFile,
    dense_config,
    positive,
    require,
    rotary_factor,
    with_window,
)
from worker.models.family import Family

_LINEARS = (
    Linear("qkv_proj", "self_attn", "qkv", "column", ("q_heads", "kv_heads", "kv_heads")),
    Linear("gate_up_proj", "mlp", "gate_up", "column", ("mlp", "mlp")),
    Linear("o_proj", "self_attn", "o", "row", ("q_heads",)),
    Linear("down_proj", "mlp", "down", "row", ("mlp",)),
)
_LONGROPE = ("longrope", "su", "yarn")  # the old names of it


class _File(ConfigFile):
    """`config.json` as written."""

    original_max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    use_sliding_window: bool = True


def _read(file: _File) -> ModelConfig:
    config = dense_config(file, rope=RopeConfig(theta=_theta(file)))
    config = replace(config, linears=_LINEARS, rope=_rope(file, config.head_dim))
    return with_window(config, file, slides=lambda _: True)


def _written_rope(file: _File) -> RopeFile:
    return file.rope_scaling or file.rope_parameters or RopeFile()


def _theta(file: _File) -> float:
    theta = _written_rope(file).rope_theta or file.rope_theta or 10_000.0
    require(theta > 1, f"rope_theta {theta} is not above 1")
    return theta


def _rope(file: _File, head_dim: int) -> RopeConfig:
    written = _written_rope(file)
    part = rotary_factor(file, written, head_dim, default=1.0)
    rope = RopeConfig(theta=_theta(file), rotary_factor=part)
    rotary_dim = rope.rotary_dim(head_dim)
    kind = written.rope_type or written.type or "default"
    if kind == "default":
        return rope
    require(kind in _LONGROPE, f"rope_type {kind!r} is not supported")
    original = positive("original_max_position_embeddings", file.original_max_position_embeddings)
    require(original > 1, f"original_max_position_embeddings {original} is not above 1")
    factor, attention = written.factor, written.attention_factor
    require(attention is None or attention > 0, f"rope attention_factor {attention} is not above 0")
    return replace(
        rope,
        kind="longrope",
        factor=file.max_position_embeddings / original if factor is None else factor,
        original_max_position=original,
        attention_factor=attention,
        short_factors=_factors("short_factor", written.short_factor, rotary_dim),
        long_factors=_factors("long_factor", written.long_factor, rotary_dim),
    )


def _factors(key: str, factors: list[float] | None, rotary_dim: int) -> tuple[float, ...]:
    require(
        factors is not None and len(factors) == rotary_dim // 2,
        f"rope {key} is not a list of {rotary_dim // 2} numbers",
    )
    assert factors is not None, "just looked at"
    require(all(factor > 0 for factor in factors), f"rope {key} has numbers that are not above 0")
    return tuple(factors)


FAMILY = Family(
    name="phi3",
    causal_lm="Phi3ForCausalLM",
    classifier="Phi3ForSequenceClassification",
    file=_File,
    read=_read,
)
