"""Adapters of every kind that PEFT makes, and PEFT's own logits of them."""

import copy
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from cluster.adapters.adapter import Adapter
from cluster.adapters.peft.checks import AdapterLimits
from cluster.adapters.peft.reader import read_adapter
from tests.llama_linears import LINEAR_MODULES
from worker.model_config import ModelConfig

LIMITS = AdapterLimits()
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
MODELS = ("llama", "llama3_biased")  # tied; not tied and biased
SEVEN = list(LINEAR_MODULES)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
BOTH = ["embed_tokens", "lm_head"]
KINDS: dict[str, dict[str, Any]] = {
    "rank 8 on every linear": {"target_modules": SEVEN, "r": 8, "lora_alpha": 16},
    "rank and alpha patterns under rslora": {
        "target_modules": SEVEN,
        "use_rslora": True,
        "rank_pattern": {"layers.0.self_attn.q_proj": 7, "mlp.*": 3},
        "alpha_pattern": {"o_proj": 7},
        "lora_alpha": 2,
    },
    "an expression and a layer": {"target_modules": r".*layers\.1\..*(v|down)_proj"},
    "lora on the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "lora on the head": {"target_modules": ["q_proj", "lm_head"]},
    "lora on both ends": {
        "target_modules": [*SEVEN, *BOTH],
        "rank_pattern": {"lm_head": 6, "embed_tokens": 3},
    },
    "lora on both ends, tied": {
        "target_modules": ["v_proj", *BOTH],
        "ensure_weight_tying": True,
    },
    "lora on the embedding alone, tied": {
        "target_modules": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "saved embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved both": {"target_modules": ["q_proj", "up_proj"], "modules_to_save": BOTH},
    "saved both, tied": {
        "target_modules": ["k_proj"],
        "modules_to_save": BOTH,
        "ensure_weight_tying": True,
    },
    "saved embedding, lora on the head": {
        "target_modules": ["o_proj", "lm_head"],
        "modules_to_save": ["embed_tokens"],
    },
    "lora on the embedding, saved head": {
        "target_modules": ["o_proj", "embed_tokens"],
        "modules_to_save": ["lm_head"],
    },
    "named twice": {
        "target_modules": ["q_proj", "embed_tokens"],
        "modules_to_save": ["embed_tokens"],
    },
    "dora": {"target_modules": SEVEN, "use_dora": True, "rank_pattern": {"o_proj": 9}},
    "dora on some of a fused linear": {"target_modules": ["k_proj", "up_proj"], "use_dora": True},
    "dora with rslora": {
        "target_modules": ["o_proj", "q_proj"],
        "use_dora": True,
        "use_rslora": True,
    },
    "dora on both ends": {"target_modules": ["down_proj", *BOTH], "use_dora": True},
    "dora and a saved head": {
        "target_modules": ["down_proj", "embed_tokens"],
        "use_dora": True,
        "modules_to_save": ["lm_head"],
    },
}
OF_FUSED_LINEARS: dict[str, dict[str, Any]] = {  # of a model that has some
    "rank 8 on all linears": {"target_modules": "all-linear", "r": 8, "lora_alpha": 16},
    "little on all linears": {"target_modules": "all-linear", "r": 8, "lora_alpha": 3},
    "dora on all linears": {"target_modules": "all-linear", "use_dora": True},
    "dora and ranks on fused linears": {
        "target_modules": ["qkv_proj", "gate_up_proj", "down_proj"],
        "use_dora": True,
        "rank_pattern": {"qkv_proj": 5},
    },
}
OF_EXPERTS: dict[str, dict[str, Any]] = {  # of a model that has some
    "attention, experts and router": {
        "target_modules": ATTENTION,
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "gate.weight"],
        "r": 8,
        "lora_alpha": 16,
    },
    "experts as modules": {"target_modules": [*SEVEN, "gate"]},  # which PEFT makes parameters of
    "attention, stacked experts and router": {  # of which no expert and no router is a module
        "target_modules": "all-linear",
        "target_parameters": ["experts.gate_up_proj", "1.mlp.experts.down_proj", "router.weight"],
        "r": 8,
        "lora_alpha": 16,
    },
}
OF_BOTH: dict[str, dict[str, Any]] = {  # of a model that has experts beside an MLP
    "all linears, experts and router": {
        "target_modules": "all-linear",
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "gate.weight"],
        "r": 8,
        "lora_alpha": 16,
    },
    "little on all linears, experts and router": {
        "target_modules": "all-linear",
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "gate.weight"],
        "r": 8,
        "lora_alpha": 3,
    },
    "all linears, experts and router of a block": {
        "target_modules": "all-linear",
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "router.weight"],
        "r": 8,
        "lora_alpha": 16,
    },
}
_ALL_KINDS = KINDS | OF_FUSED_LINEARS | OF_EXPERTS | OF_BOTH


@contextmanager
def _patterns_of_parameters() -> Iterator[None]:
    """Let PEFT warn in vain: it misses patterns of parameters among modules, and uses them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern", RuntimeWarning)
        yield


def train(model: PeftModel, seed: int = 0) -> None:
    """Move everything that can be trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                scale = 0.3 if "magnitude" in name else 0.1
                size = parameter.std() if parameter.numel() > 1 else parameter.abs().mean()
                parameter.add_((noise * scale * size).to(parameter.dtype))


def make_adapter_dir(base: PreTrainedModel, kind: str, folder: Path) -> None:
    """Write an adapter of some kind for a model."""
    torch.manual_seed(list(_ALL_KINDS).index(kind))
    # A copy: PEFT takes modules out of the list that it is given, which other kinds share.
    keys = {"r": 4, "lora_alpha": 3, **copy.deepcopy(_ALL_KINDS[kind])}
    with _patterns_of_parameters():
        model = get_peft_model(copy.deepcopy(base), LoraConfig(init_lora_weights=False, **keys))
    train(model)
    model.save_pretrained(folder)


def rewrite(source: Path, target: Path, change: Callable[[Tensor], Tensor]) -> None:
    """Write an adapter again with all its tensors changed."""
    name = "adapter_model.safetensors"
    tensors = {key: change(tensor) for key, tensor in load_file(source / name).items()}
    save_file(tensors, target / name)
    shutil.copy(source / "adapter_config.json", target)


def by_peft(base: torch.nn.Module, folder: Path, tokens: tuple[int, ...]) -> Tensor:
    """Return PEFT's logits on the weights as `base` rounds them, all computed in float32."""
    with _patterns_of_parameters():
        model = PeftModel.from_pretrained(copy.deepcopy(base), folder).eval().float()
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.float()


def error(found: Tensor, expected: Tensor) -> float:
    """Return the relative error of logits."""
    return float((found - expected).norm() / expected.norm())


def read(folder: Path, config: ModelConfig) -> Adapter:
    """Return an adapter as the pool reads it."""
    return read_adapter(folder, config, LIMITS)
