"""Granite 4 H (transformers.models.granitemoehybrid): most layers have a Mamba-2 mixer.

The others attend, without rotary embedding; Granite's four multipliers. All have an MLP, and may
have experts beside it.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import msgspec

from worker.linears import (
    Linear,
    Stack,
    mixer_linears,
    router_linear,
    separate_linears,
    stacked_expert_linears,
)
from worker.mixers.config import Mamba2Config
from worker.model_config import ExpertsConfig, ModelConfig
from worker.models.config_file import (
    dense_config,
    mixer_layers,
    positive,
    require,
    with_experts,
)
from worker.models.families.granite import GraniteFile, with_multipliers
from worker.models.family import Family

_BLOCK, _EXPERTS = "mamba", "block_sparse_moe"
_LARGEST_EXPANSION = 2**10


class _File(GraniteFile):
    """`config.json` as written; what gives no layer a type leaves all layers to mixers.

    `intermediate_size` is that of an expert.
    """

    position_embedding_type: str | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    shared_intermediate_size: int = 1024  # of the MLP that all layers have
    mamba_n_heads: int = 128
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_head: int | str = "auto"
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: list[float | dict[str, str]] | None = None


def _read(file: _File) -> ModelConfig:
    kind = file.position_embedding_type
    require(kind in (None, "nope", "rope"), f"position_embedding_type {kind!r} is not supported")
    mlp = positive("shared_intermediate_size", file.shared_intermediate_size)
    config = dense_config(msgspec.structs.replace(file, intermediate_size=mlp))
    config = with_multipliers(config, file)
    layers = mixer_layers(
        file, mixing=("mamba", "linear_attention"), attending=("attention", "full_attention")
    )
    attending = tuple(sorted(frozenset(range(config.num_layers)).difference(layers)))
    config = replace(
        config,
        linears=_linears(file),
        nope_layers=() if kind == "rope" else attending,
    )
    if not layers:
        linears = tuple(one for one in config.linears if one.in_layers != "mixer")
        return _with_experts(replace(config, linears=linears), file)
    config = replace(config, mixer=_mixer(file), mixer_block=_BLOCK, mixer_layers=layers)
    return _with_experts(config, file)


def _with_experts(config: ModelConfig, file: _File) -> ModelConfig:
    if file.num_local_experts == 0:
        return config
    experts = ExpertsConfig(
        num_experts=file.num_local_experts,
        top_k=file.num_experts_per_tok,
        intermediate_size=positive("intermediate_size", file.intermediate_size),
        renormalize=True,  # which is a softmax over those that were chosen
        layers=tuple(range(config.num_layers)),
    )
    return with_experts(config, experts, _expert_linears)


def _expert_linears(num_experts: int) -> Iterator[Linear]:
    """Yield the linears of a layer's experts and of their router.

    To transformers before release 5 the router was a module, in the way a checkpoint has it.
    """
    yield router_linear("router.layer", _EXPERTS, f"{_EXPERTS}.router.weight")
    gate_up, down = Stack("input_linear.weight"), Stack("output_linear.weight")
    yield from stacked_expert_linears(num_experts, _EXPERTS, gate_up, down)


def _linears(file: _File) -> tuple[Linear, ...]:
    bias = file.attention_bias
    return (
        *(
            replace(linear, in_layers="attention")
            for linear in separate_linears(qkv_bias=bias, o_bias=bias)
            if linear.fused in ("qkv", "o")
        ),
        *mixer_linears(_BLOCK, ("in_proj",), "out_proj", has_bias=file.mamba_proj_bias),
        Linear("input_linear", "shared_mlp", "gate_up", "column", ("mlp", "mlp")),
        Linear("output_linear", "shared_mlp", "down", "row", ("mlp",)),
    )


def _mixer(file: _File) -> Mamba2Config:
    num_heads = positive("mamba_n_heads", file.mamba_n_heads)
    inner = positive("mamba_expand", file.mamba_expand, _LARGEST_EXPANSION) * file.hidden_size
    head_dim = inner // num_heads if file.mamba_d_head == "auto" else file.mamba_d_head
    require(
        isinstance(head_dim, int) and head_dim * num_heads == inner,
        f"mamba_n_heads {num_heads} times mamba_d_head {head_dim} is not mamba_expand times "
        f"hidden_size, {inner}",
    )
    assert isinstance(head_dim, int), "just looked at"
    # The norm goes over all features, whatever the groups, of which no published model has more.
    require(file.mamba_n_groups == 1, f"mamba_n_groups {file.mamba_n_groups} is not supported")
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=1,
        state_size=positive("mamba_d_state", file.mamba_d_state),
        num_taps=positive("mamba_d_conv", file.mamba_d_conv),
        dt_limit=_dt_limit(file),
        norm_eps=file.rms_norm_eps,
        has_norm=True,
        gate_first=True,
        has_conv_bias=file.mamba_conv_bias,
    )


def _dt_limit(file: _File) -> tuple[float, float]:
    """Return what time steps are cut to; transformers 5 writes infinity as {"__float__": ...}."""
    written = file.time_step_limit or [0.0, math.inf]
    complaint = f"time_step_limit {written} is not two numbers from 0 on, in order"
    require(len(written) == 2, complaint)
    least, most = (_number(one) for one in written)
    require(0 <= least < most, complaint)
    return least, most


def _number(written: float | dict[str, str]) -> float:
    if isinstance(written, dict):
        return math.inf if written == {"__float__": "Infinity"} else math.nan
    return written


FAMILY = Family(
    name="granitemoehybrid", causal_lm="GraniteMoeHybridForCausalLM", file=_File, read=_read
)
