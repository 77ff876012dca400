"""What is told of a GPU's steps is what they allocate: the same steps run without memory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GptOssConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from deploy.memory.gpu_steps import (
    GRAPH_LAYER,
    graph_bytes,
    index_bytes,
    largest_lora_rank,
    largest_step,
)
from deploy.memory.step_tensors import StepMemory, StepShape, num_splits
from kernels.gpu.attention.paged_decode import most_splits
from tests.deploy.memory.meta_step import PAGE_SIZE, Limits, MetaRank
from tests.worker.models.families.tiny import tiny_family
from worker.model_config import ModelConfig
from worker.model_config_reader import read_model_config
from worker.runners.capture_sizes import CAPTURE_RANKS, capture_sizes

FAMILIES = [
    *("llama", "gemma3", "olmo2", "phi3", "mixtral", "qwen3_moe", "gpt_oss", "lfm2"),
    *("granitemoehybrid", "granitemoehybrid_sparse", "qwen3_5", "qwen3_5_moe"),
]
TINY = Limits(max_model_len=512, max_num_batched_tokens=300, max_num_seqs=16)
LARGE = Limits(max_model_len=32768, max_num_batched_tokens=2048, max_num_seqs=256)


@dataclass(frozen=True)
class Large:
    """A model of a size that people serve, of which a few layers are enough here."""

    kind: type[PretrainedConfig]
    architecture: str
    sizes: Mapping[str, Any]
    tp: int
    limits: Limits = LARGE


LARGE_MODELS = {
    "a Llama of 8B": Large(
        LlamaConfig,
        "LlamaForCausalLM",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
        1,
    ),
    "a Llama of 70B": Large(
        LlamaConfig,
        "LlamaForCausalLM",
        {
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
        8,
        replace(LARGE, max_num_batched_tokens=8192),
    ),
    "a Qwen3 of 32B": Large(
        Qwen3Config,
        "Qwen3ForCausalLM",
        {
            "vocab_size": 151936,
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
        },
        2,
        replace(LARGE, max_num_seqs=512),
    ),
    "a Qwen3 of 30B with experts": Large(
        Qwen3MoeConfig,
        "Qwen3MoeForCausalLM",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 40960,
        },
        4,
    ),
    "a gpt-oss of 20B": Large(
        GptOssConfig,
        "GptOssForCausalLM",
        {"num_local_experts": 32, "max_position_embeddings": 131072},
        2,
    ),
    "a hybrid Granite of 7B": Large(
        GraniteMoeHybridConfig,
        "GraniteMoeHybridForCausalLM",
        {
            "vocab_size": 100352,
            "hidden_size": 1536,
            "intermediate_size": 512,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_local_experts": 62,
            "num_experts_per_tok": 6,
            "shared_intermediate_size": 1024,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "layer_types": ["mamba", "mamba", "attention"],
            "position_embedding_type": "nope",
            "max_position_embeddings": 131072,
        },
        1,
    ),
}


def tiny_model(kind: str, path: Path) -> ModelConfig:
    model = tiny_family(kind)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    return read_model_config(path)


def large_model(large: Large, path: Path) -> ModelConfig:
    config = large.kind(num_hidden_layers=3, architectures=[large.architecture], **large.sizes)
    config.save_pretrained(path)
    return read_model_config(path)


def check(
    model: ModelConfig, tp: int, rank: int, limits: Limits, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Run the largest steps of a rank and a draw, and compare with what is told of them."""
    on_meta = MetaRank(model, tp, rank, dtype, limits)
    steps = StepMemory(model, on_meta.part, dtype.itemsize, deterministic=limits.deterministic)
    lora_rank = largest_lora_rank(model, limits.max_lora_rank) if limits.num_slots else 0
    ran, drew = on_meta.run_largest(), on_meta.draw()
    rows, samples = limits.max_num_batched_tokens, limits.max_num_seqs
    prompts = StepShape(rows, samples, 0, 0, lora_rank)
    decodes = StepShape(samples, samples, samples, num_splits(limits.max_model_len), lora_rank)
    assert max(map(steps.peak, (prompts, decodes))) == ran.peak
    assert steps.draw_peak(samples) == drew.peak
    told = largest_step(steps, rows, samples, limits.max_model_len, lora_rank)
    assert told == max(ran.peak, drew.peak)
    pages = -(-limits.max_model_len // PAGE_SIZE)
    arrays = max(ran.most_indices, drew.most_indices)
    assert arrays <= index_bytes(rows, samples, pages) < 4 * arrays + 2**16


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_what_a_step_allocates_is_told_to_the_byte(tmp_path: Path, kind: str, tp: int) -> None:
    model = tiny_model(kind, tmp_path)
    check(model, tp, 0, TINY)
    check(model, tp, tp - 1, replace(TINY, num_slots=4), torch.float32)
    check(model, tp, tp - 1, replace(TINY, deterministic=True))


@pytest.mark.parametrize("name", LARGE_MODELS)
def test_so_it_is_of_models_that_people_serve(tmp_path: Path, name: str) -> None:
    large = LARGE_MODELS[name]
    model = large_model(large, tmp_path)
    check(model, large.tp, 0, large.limits)
    check(model, large.tp, large.tp - 1, replace(large.limits, num_slots=8, max_lora_rank=128))


def test_long_contexts_that_decode_take_more_than_prompts(tmp_path: Path) -> None:
    """Of each split of a context there are sums until they are merged."""
    model = large_model(LARGE_MODELS["a Llama of 8B"], tmp_path)
    few_rows = Limits(max_model_len=131072, max_num_batched_tokens=512, max_num_seqs=256)
    check(model, 1, 0, few_rows)
    steps = StepMemory(model, MetaRank(model, 1, 0, torch.bfloat16, few_rows).part, 2)
    assert steps.peak(StepShape(256, 256, 256, 64, 0)) > steps.peak(StepShape(512, 256, 0, 0, 0))


@pytest.mark.parametrize("context", [1, 128, 1000, 1024, 1025, 4096, 32768, 32769, 2**17, 10**6])
def test_contexts_have_as_many_splits_as_kernels_cut_them_into(context: int) -> None:
    assert num_splits(context) == most_splits(context)


@pytest.mark.parametrize("num_slots", [0, 4])
def test_graphs_share_the_memory_of_a_step_and_have_arrays_of_their_own(
    tmp_path: Path, num_slots: int
) -> None:
    model = large_model(LARGE_MODELS["a Llama of 8B"], tmp_path)
    on_meta = MetaRank(model, 1, 0, torch.bfloat16, replace(LARGE, num_slots=num_slots))
    arrays = on_meta.make_graph_batches().most_indices
    steps = StepMemory(model, on_meta.part, 2)
    sizes = capture_sizes(LARGE.max_num_seqs)
    rows, lora_rank = sizes[-1], CAPTURE_RANKS[-1] if num_slots else 0
    one = steps.peak(StepShape(rows, rows, rows, num_splits(LARGE.max_model_len), lora_rank))
    told = graph_bytes(
        steps, LARGE.max_num_seqs, LARGE.max_model_len, PAGE_SIZE, has_adapters=num_slots > 0
    )
    rest = told - one - 4 * rows * model.vocab_size
    num_graphs = len(sizes) * (3 if num_slots else 1) * 3  # contexts of 4k, 16k and 128k
    driver = num_graphs * model.num_layers * GRAPH_LAYER
    assert arrays <= rest - driver < 3 * arrays
