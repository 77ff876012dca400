"""Mixtral (transformers.models.mixtral): Mistral whose every layer is sparse."""

from functools import partial

from worker.linears import expert_linears
from worker.model_config import ExpertsConfig, ModelConfig
from worker.models.config_file import ConfigFile, dense_config, with_experts, with_window
from worker.models.family import Family


class _File(ConfigFile):
    """`config.json` as written; `intermediate_size` is that of an expert."""

    num_key_value_heads: int | None = 8
    rms_norm_eps: float = 1e-5
    rope_theta: float | None = 1e6
    use_sliding_window: bool = True
    num_local_experts: int = 8
    num_experts_per_tok: int = 2


def _read(file: _File) -> ModelConfig:
    config = with_window(dense_config(file), file, slides=lambda _: True)
    experts = ExpertsConfig(
        num_experts=file.num_local_experts,
        top_k=file.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        renormalize=True,
        layers=tuple(range(config.num_layers)),
    )
    linears_of = partial(expert_linears, block="block_sparse_moe", projections=("w1", "w3", "w2"))
    return with_experts(config, experts, linears_of)


FAMILY = Family(
    name="mixtral",
    causal_lm="MixtralForCausalLM",
    classifier="MixtralForSequenceClassification",
    file=_File,
    read=_read,
)
