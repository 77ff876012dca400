"""A tiny model and a tiny adapter directory for it that tests may spoil before it is written."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from cluster.adapters.adapter import Adapter
from cluster.adapters.peft.checks import AdapterLimits
from cluster.adapters.peft.lora_modules import SCORE_NAME
from cluster.adapters.peft.reader import read_adapter
from cluster.adapters.sharding import RankMemory
from cluster.errors import InvalidAdapter
from tests.whole_modules import adapted_shape, module_path
from worker.linears import separate_linears
from worker.lora.shard import VOCABULARY_MODULES
from worker.model_config import ModelConfig, RopeConfig

MODEL = ModelConfig(
    family="llama",
    num_layers=2,
    hidden_size=27,
    intermediate_size=40,
    num_heads=9,
    num_kv_heads=3,
    head_dim=4,
    vocab_size=64,
    max_position=128,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0),
    tie_word_embeddings=True,
    linears=separate_linears(),
    qk_norm=False,
    dtype="float32",
    bos_token_id=None,
    eos_token_ids=(2,),
)
MEMORY = RankMemory(tp=1, adapter_item_bytes=4, model_item_bytes=4)
LIMITS = AdapterLimits(max_lora_rank=16)


def a_of(layer: int, module: str) -> str:
    """Return the name of a module's A tensor in a PEFT file."""
    return _named(
        layer, module, "lora_embedding_A" if module == "embed_tokens" else "lora_A.weight"
    )


def b_of(layer: int, module: str) -> str:
    """Return the name of a module's B tensor in a PEFT file."""
    return _named(
        layer, module, "lora_embedding_B" if module == "embed_tokens" else "lora_B.weight"
    )


def magnitude_of(layer: int, module: str) -> str:
    """Return the name of a module's DoRA magnitude in a PEFT file."""
    return _named(layer, module, "lora_magnitude_vector")


def table_of(module: str, end: str = "weight") -> str:
    """Return the name of a saved module's weight in a PEFT file."""
    return _named(0, module, end)


def _named(layer: int, module: str, end: str) -> str:
    return f"base_model.model.{module_path(MODEL.linears, layer, module)}.{end}"


@dataclass
class TinyAdapter:
    """The two files of an adapter, before they are written."""

    config: dict[str, Any]
    tensors: dict[str, npt.NDArray[Any]]

    def write(self, folder: Path) -> Path:
        """Write both files and return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / "adapter_model.safetensors")
        return folder

    def read(self, folder: Path) -> Adapter:
        """Write and read again."""
        return read_adapter(self.write(folder), MODEL, LIMITS)


def tiny_adapter(
    *targets: str, lora_rank: int = 4, alpha: float = 8, dtype: Any = np.float32, seed: int = 0
) -> TinyAdapter:
    """Return a valid adapter on the given modules of every layer."""
    random = np.random.default_rng(seed)
    tensors = {}
    for module in targets:
        for layer in range(1 if module in VOCABULARY_MODULES else MODEL.num_layers):
            rows, columns = adapted_shape(MODEL, module)
            tensors[a_of(layer, module)] = random.normal(size=(lora_rank, columns)).astype(dtype)
            tensors[b_of(layer, module)] = random.normal(size=(rows, lora_rank)).astype(dtype)
    config = {
        "peft_type": "LORA",
        "r": lora_rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
    }
    return TinyAdapter(config, tensors)


def with_dora(tiny: TinyAdapter) -> TinyAdapter:
    """Give every LoRA a magnitude."""
    tiny.config["use_dora"] = True
    for name, tensor in list(tiny.tensors.items()):
        for end in ("lora_B.weight", "lora_embedding_B"):
            if name.endswith(end):
                magnitude = np.linspace(0.5, 2, tensor.shape[0]).astype(tensor.dtype)
                tiny.tensors[name.removesuffix(end) + "lora_magnitude_vector"] = magnitude
    return tiny


def with_saved(tiny: TinyAdapter, *modules: str, end: str = "weight") -> TinyAdapter:
    """Save modules of the vocabulary whole, or put their weight beneath a LoRA."""
    random = np.random.default_rng(len(modules))
    shape = (MODEL.vocab_size, MODEL.hidden_size)
    dtype = next(iter(tiny.tensors.values())).dtype
    if end == "weight":
        tiny.config["modules_to_save"] = list(modules)
    for module in modules:
        tiny.tensors[table_of(module, end)] = random.normal(size=shape).astype(dtype)
    return tiny


def with_score(tiny: TinyAdapter, num_labels: int = 3, **config: Any) -> TinyAdapter:
    """Save a classification head, as PEFT does for a task of type SEQ_CLS."""
    saved = tiny.config.get("modules_to_save", [])
    tiny.config |= {"task_type": "SEQ_CLS", "modules_to_save": [*saved, "classifier", "score"]}
    tiny.config |= config
    head = np.random.default_rng(num_labels).normal(size=(num_labels, MODEL.hidden_size))
    tiny.tensors[SCORE_NAME] = head.astype(next(iter(tiny.tensors.values())).dtype)
    return tiny


def reason(folder: Path) -> str:
    """Return why an adapter directory is refused."""
    with pytest.raises(InvalidAdapter) as caught:
        read_adapter(folder, MODEL, LIMITS)
    assert caught.value.status == 400
    assert caught.value.param == "lora_path"
    assert str(folder) in caught.value.message
    return caught.value.message
