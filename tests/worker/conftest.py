"""Tiny models with random weights of every supported kind, and groups of ranks that run them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.worker.group import RankGroup
from tests.worker.logit_ranks import LogitRanks
from tests.worker.models.families.tiny import tiny_family
from tests.worker.peft_adapters import make_adapter_dir

COMMON = {"vocab_size": 131, "num_hidden_layers": 2, "max_position_embeddings": 512}


@dataclass(frozen=True)
class TinyModel:
    """A model in transformers, in float32, and the directory that it was saved to."""

    reference: PreTrainedModel
    path: Path


def _build(name: str) -> PreTrainedModel:
    match name:
        case "llama":  # the heads of SmolLM2, and its tied embedding
            return LlamaForCausalLM(
                LlamaConfig(
                    hidden_size=72,
                    intermediate_size=100,
                    num_attention_heads=9,
                    num_key_value_heads=3,
                    head_dim=8,
                    tie_word_embeddings=True,
                    **COMMON,
                )
            )
        case "llama3_biased":
            return LlamaForCausalLM(
                LlamaConfig(
                    hidden_size=64,
                    intermediate_size=192,
                    num_attention_heads=8,
                    num_key_value_heads=2,
                    attention_bias=True,
                    mlp_bias=True,
                    rope_parameters={
                        "rope_type": "llama3",
                        "rope_theta": 500.0,
                        "factor": 8.0,
                        "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 64,
                    },
                    **COMMON,
                )
            )
        case "mistral":
            return MistralForCausalLM(
                MistralConfig(
                    hidden_size=64,
                    intermediate_size=90,
                    num_attention_heads=8,
                    num_key_value_heads=4,
                    sliding_window=None,
                    rope_parameters={
                        "rope_type": "linear",
                        "rope_theta": 10000.0,
                        "factor": 2.0,
                    },
                    **COMMON,
                )
            )
        case "qwen2":
            return Qwen2ForCausalLM(
                Qwen2Config(
                    hidden_size=48,
                    intermediate_size=64,
                    num_attention_heads=6,
                    num_key_value_heads=2,
                    rope_parameters={
                        "rope_type": "yarn",
                        "rope_theta": 10000.0,
                        "factor": 4.0,
                        "original_max_position_embeddings": 128,
                    },
                    **COMMON,
                )
            )
        case "olmo2" | "olmo3" | "phi3" | "gemma3" | "mixtral" | "qwen3_moe" | "gpt_oss":
            return tiny_family(name)
        case "lfm2" | "granitemoehybrid" | "granitemoehybrid_sparse" | "qwen3_5" | "qwen3_5_moe":
            return tiny_family(name)
        case "gpt_oss_wide":  # two ranks have whole groups of its experts' features, too
            return tiny_family("gpt_oss", intermediate_size=192)
        case _:
            return Qwen3ForCausalLM(
                Qwen3Config(
                    hidden_size=64,
                    intermediate_size=96,
                    num_attention_heads=4,
                    num_key_value_heads=4,
                    head_dim=32,
                    tie_word_embeddings=True,
                    **COMMON,
                )
            )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Return a function that makes a tiny model once and gives it by name."""
    made: dict[str, TinyModel] = {}

    def make(name: str) -> TinyModel:
        if name not in made:
            torch.manual_seed(7)
            model = _build(name).eval()
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    is_norm = "norm" in key
                    parameter.normal_(1.0 if is_norm else 0.0, 0.2 if is_norm else 0.15)
            path = tmp_path_factory.mktemp(name)
            # Several files for one of the models: the sharded form needs a reader too.
            model.save_pretrained(path, max_shard_size="60KB" if name == "mistral" else "5GB")
            made[name] = TinyModel(model, path)
        return made[name]

    return make


@pytest.fixture
def start_group() -> Iterator[Callable[..., RankGroup]]:
    """Return a function that starts a group of ranks; all are stopped at the end."""
    groups: list[RankGroup] = []

    def start(path: Path, **options: object) -> RankGroup:
        groups.append(RankGroup(path, **options))  # type: ignore[arg-type]
        return groups[-1]

    yield start
    for group in groups:
        group.close()


@pytest.fixture(scope="session")
def made(
    tiny_model: Callable[[str], TinyModel], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """Return a function that gives the directory of an adapter of some kind for some model."""
    folders: dict[tuple[str, str], Path] = {}

    def make(model_name: str, kind: str) -> Path:
        if (model_name, kind) not in folders:
            folder = tmp_path_factory.mktemp("adapter")
            make_adapter_dir(tiny_model(model_name).reference, kind, folder)
            folders[model_name, kind] = folder
        return folders[model_name, kind]

    return make


@pytest.fixture(scope="module")
def ranks(tiny_model: Callable[[str], TinyModel]) -> Iterator[Callable[..., LogitRanks]]:
    """Return a function that starts ranks once and gives them by model, size and dtype."""
    started: dict[tuple[str, int, torch.dtype], LogitRanks] = {}

    def start(model_name: str, tp: int, dtype: torch.dtype) -> LogitRanks:
        key = (model_name, tp, dtype)
        if key not in started:
            started[key] = LogitRanks(tiny_model(model_name).path, tp, dtype)
        return started[key]

    yield start
    for group in started.values():
        group.close()
