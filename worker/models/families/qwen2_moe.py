"""Qwen2, sparse (transformers.models.qwen2_moe): experts beside an MLP with a gate of its own."""

from collections.abc import Iterator
from dataclasses import replace

from worker.linears import Linear, Stack, router_linear, stacked_expert_linears
from worker.model_config import ExpertsConfig, ModelConfig
from worker.models.config_file import (
    ConfigFile,
    dense_config,
    positive,
    require,
    with_experts,
    with_window,
)
from worker.models.family import Family

_BLOCK = "mlp"


class _File(ConfigFile):
    """`config.json` as written; `intermediate_size` is that of layers without experts."""

    num_key_value_heads: int | None = 16
    sliding_window: int | None = 4096
    qkv_bias: bool = True
    num_experts: int = 60
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None


def _read(file: _File) -> ModelConfig:
    # Their MLPs are as wide as `intermediate_size` says; no published model has such layers.
    require(not file.mlp_only_layers, "mlp_only_layers is not supported")
    step = file.decoder_sparse_step
    require(step == 1, f"decoder_sparse_step {step} is not supported")
    mlp = positive("shared_expert_intermediate_size", file.shared_expert_intermediate_size)
    file.intermediate_size = mlp
    config = dense_config(file, qkv_bias=file.qkv_bias)
    most = file.max_window_layers
    config = with_window(config, file, slides=lambda layer: layer % 2 == 0 and layer < most)
    experts = ExpertsConfig(
        num_experts=file.num_experts,
        top_k=file.num_experts_per_tok,
        intermediate_size=positive("moe_intermediate_size", file.moe_intermediate_size),
        renormalize=file.norm_topk_prob,
        layers=tuple(range(config.num_layers)),
    )
    return with_gated_mlp(config, experts)


def with_gated_mlp(config: ModelConfig, experts: ExpertsConfig) -> ModelConfig:
    """Return the shape of a model whose every layer has experts beside its MLP, which has a gate.

    Args:
        config: without experts.
        experts: of its layers.

    Raises:
        ValueError: as `with_experts` does.
    """
    linears = tuple(map(_shared, config.linears))
    experts = replace(experts, has_shared_gate=True)
    return with_experts(replace(config, linears=linears), experts, _sparse_linears)


def _shared(linear: Linear) -> Linear:
    """Return a linear of an MLP as that of the one that stands beside experts."""
    if linear.fused not in ("gate_up", "down"):
        return linear
    return replace(linear, name=f"shared_expert.{linear.name}", in_layers="all")


def _sparse_linears(num_experts: int) -> Iterator[Linear]:
    """Yield the linears of a layer's experts, of their router, and of the gate of the MLP.

    transformers 5 has experts in stacks, and checkpoints have them so or each of them by itself.
    """
    router = router_linear("gate", _BLOCK, f"{_BLOCK}.gate.weight")
    yield replace(router, is_module=False)
    gate = Linear("shared_expert_gate", _BLOCK, "router", "column", ("shared_gate",))
    yield replace(gate, in_layers="sparse")
    gate_up, down = (
        Stack(f"experts.{name}", is_optional=True) for name in ("gate_up_proj", "down_proj")
    )
    yield from stacked_expert_linears(num_experts, _BLOCK, gate_up, down)


FAMILY = Family(
    name="qwen2_moe",
    causal_lm="Qwen2MoeForCausalLM",
    classifier="Qwen2MoeForSequenceClassification",
    file=_File,
    read=_read,
)
