"""Qwen3, sparse (transformers.models.qwen3_moe): experts in some layers, an MLP in the others."""

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


class _File(ConfigFile):
    """`config.json` as written; transformers 5 writes `num_local_experts`."""

    num_key_value_heads: int | None = 4
    sliding_window: int | None = 4096
    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None


def _read(file: _File) -> ModelConfig:
    bias = file.attention_bias
    config = dense_config(file, qkv_bias=bias, o_bias=bias, qk_norm=True)
    config = with_window(config, file, slides=lambda _: True)
    step = positive("decoder_sparse_step", file.decoder_sparse_step)
    dense = frozenset(file.mlp_only_layers or ())
    sparse = [
        layer
        for layer in range(config.num_layers)
        if layer not in dense and (layer + 1) % step == 0
    ]
    counts = {one for one in (file.num_experts, file.num_local_experts) if one is not None}
    require(len(counts) < 2, "num_experts and num_local_experts differ")
    num_experts = counts.pop() if counts else 128
    if num_experts == 0 or not sparse:
        return config
    experts = ExpertsConfig(
        num_experts=num_experts,
        top_k=file.num_experts_per_tok,
        intermediate_size=positive("moe_intermediate_size", file.moe_intermediate_size),
        renormalize=file.norm_topk_prob,
        layers=tuple(sparse),
    )
    return with_experts(config, experts)


FAMILY = Family(
    name="qwen3_moe",
    causal_lm="Qwen3MoeForCausalLM",
    classifier="Qwen3MoeForSequenceClassification",
    file=_File,
    read=_read,
)
