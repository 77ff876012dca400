"""Qwen3.5, sparse, its text alone (transformers.models.qwen3_5_moe): most layers have a delta net.

The layers are those of the dense models, with experts beside an MLP that has a gate, as Qwen2's.
"""

from worker.model_config import ExpertsConfig, ModelConfig
from worker.models.config_file import positive
from worker.models.families.qwen2_moe import with_gated_mlp
from worker.models.families.qwen3_5 import HybridFile, read_hybrid
from worker.models.family import Family


class _File(HybridFile, kw_only=True):
    """`config.json` as written."""

    intermediate_size: int = 0  # of nothing
    num_key_value_heads: int | None = 2
    num_experts: int = 256
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512


def _read(file: _File) -> ModelConfig:
    mlp = positive("shared_expert_intermediate_size", file.shared_expert_intermediate_size)
    file.intermediate_size = mlp
    config = read_hybrid(file)
    experts = ExpertsConfig(
        num_experts=file.num_experts,
        top_k=file.num_experts_per_tok,
        intermediate_size=positive("moe_intermediate_size", file.moe_intermediate_size),
        renormalize=True,
        layers=tuple(range(config.num_layers)),
    )
    return with_gated_mlp(config, experts)


FAMILY = Family(
    name="qwen3_5_moe",
    causal_lm="Qwen3_5MoeForCausalLM",
    multimodal="Qwen3_5MoeForConditionalGeneration",
    file=_File,
    read=_read,
)
