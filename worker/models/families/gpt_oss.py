"""gpt-oss (transformers.models.gpt_oss): attention sinks, every second layer slides, experts alone.

All linears have biases. Experts come in stacks, as they are or in MXFP4, and have a gate that is
cut at a limit.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import msgspec

from worker.linears import MXFP4_BLOCK, Linear, Stack, router_linear, stacked_expert_linears
from worker.model_config import ClampedSwiglu, ExpertsConfig, ModelConfig
from worker.models.config_file import (
    ConfigFile,
    RopeFile,
    dense_config,
    multiplier,
    require,
    with_experts,
    with_window,
)
from worker.models.family import Family

# Where the file says nothing of it.
_ROPE = RopeFile(
    rope_type="yarn",
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    original_max_position_embeddings=4096,
    truncate=False,
)


class _Quantization(msgspec.Struct):
    """`quantization_config` as written."""

    quant_method: str


class _File(ConfigFile):
    """`config.json` as written; `intermediate_size` is that of an expert."""

    num_key_value_heads: int | None = 8
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    rope_theta: float | None = 150_000.0
    sliding_window: int | None = 128
    use_sliding_window: bool = True
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    quantization_config: _Quantization | None = None


def _read(file: _File) -> ModelConfig:
    if file.rope_parameters is None and file.rope_scaling is None:
        file = msgspec.structs.replace(file, rope_scaling=_ROPE)
    is_mxfp4 = _is_mxfp4(file)
    bias = file.attention_bias
    config = dense_config(file, head_dim=64, qkv_bias=bias, o_bias=bias)
    config = with_window(config, file, slides=lambda layer: layer % 2 == 0)
    experts = ExpertsConfig(
        num_experts=file.num_local_experts,
        top_k=file.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        renormalize=True,  # which is a softmax over those that were chosen
        layers=tuple(range(config.num_layers)),
        swiglu=ClampedSwiglu(
            multiplier("swiglu_alpha", file.swiglu_alpha),
            multiplier("swiglu_limit", file.swiglu_limit),
        ),
    )
    linears_of = partial(sparse_linears, is_mxfp4=is_mxfp4)
    return with_experts(replace(config, has_sinks=True), experts, linears_of)


def sparse_linears(num_experts: int, *, is_mxfp4: bool = False) -> Iterator[Linear]:
    """Yield the linears of a layer's experts and of their router, all of which have biases.

    The outputs of gate and up take turns.
    """
    router = router_linear("router", "mlp", "mlp.router.weight")
    yield replace(router, has_bias=True, is_module=False)
    gate_up = Stack("experts.gate_up_proj", takes_turns=True, is_turned=True, is_mxfp4=is_mxfp4)
    down = Stack("experts.down_proj", is_turned=True, is_mxfp4=is_mxfp4)
    yield from stacked_expert_linears(num_experts, "mlp", gate_up, down, has_bias=True)


def _is_mxfp4(file: _File) -> bool:
    """Tell whether the checkpoint has experts in MXFP4."""
    quantization = file.quantization_config
    if quantization is None:
        return False
    method = quantization.quant_method
    require(method == "mxfp4", f"quantization_config: quant_method {method!r} is not supported")
    for key in ("hidden_size", "intermediate_size"):
        size = getattr(file, key)
        require(size % MXFP4_BLOCK == 0, f"{key} {size} is not a multiple of {MXFP4_BLOCK}")
    return True


FAMILY = Family(
    name="gpt_oss",
    causal_lm="GptOssForCausalLM",
    classifier="GptOssForSequenceClassification",
    file=_File,
    read=_read,
)
