"""What PEFT makes, saves and computes is what the reader reads: tensors, lora_rank, scaling."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.adapters.peft.reader import read_adapter
from cluster.errors import InvalidAdapter
from tests.cluster.adapters.tiny import LIMITS, MODEL
from tests.llama_linears import LINEAR_MODULES

CASES: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 8, "lora_alpha": 3, "use_rslora": True, "target_modules": "all-linear"},
    "rank and alpha patterns": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": list(LINEAR_MODULES),
        "rank_pattern": {
            "model.layers.0.self_attn.q_proj": 2,
            "proj": 16,  # a part of a name is not a name
            r"layers\.1\..*_proj": 3,
            "v_proj": 7,
            "q_proj": 5,
        },
        "alpha_pattern": {"mlp.(up|gate)_proj": 9, "down.proj": 1, "^model.layers.1.mlp.*": 11},
    },
    "patterns under rslora": {
        "r": 4,
        "lora_alpha": 6,
        "use_rslora": True,
        "target_modules": ["k_proj", "o_proj"],
        "rank_pattern": {"o_proj": 12},
        "alpha_pattern": {"self_attn.k_proj": 2.5},
    },
    "an expression": {"r": 4, "target_modules": r"model\.layers\.\d+\.mlp\.(up|down)_proj"},
    "one layer": {"r": 4, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1},
    "layers by list": {
        "r": 4,
        "target_modules": ["o_proj"],
        "layers_to_transform": [0],
        "layers_pattern": "layers",
    },
    "a full name ignores the layers": {
        "r": 4,
        "target_modules": ["model.layers.0.self_attn.q_proj", "k_proj"],
        "layers_to_transform": [1],
    },
    "some excluded": {
        "r": 4,
        "target_modules": "all-linear",
        "exclude_modules": ["layers.0.mlp.up_proj", "v_proj"],
    },
    "excluded by an expression": {
        "r": 4,
        "target_modules": ["q_proj", "v_proj"],
        "exclude_modules": r".*layers\.1.*",
    },
}


def base_model() -> LlamaForCausalLM:
    """Return transformers' twin of MODEL."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=MODEL.vocab_size,
        hidden_size=MODEL.hidden_size,
        intermediate_size=MODEL.intermediate_size,
        num_hidden_layers=MODEL.num_layers,
        num_attention_heads=MODEL.num_heads,
        num_key_value_heads=MODEL.num_kv_heads,
        head_dim=MODEL.head_dim,
    )
    return LlamaForCausalLM(config)


def saved_by_peft(keys: dict[str, Any], folder: Path) -> PeftModel:
    """Make an adapter, give it weights, save it and return the model."""
    model = get_peft_model(base_model(), LoraConfig(init_lora_weights=False, **keys))
    model.save_pretrained(folder)
    return model


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")
@pytest.mark.parametrize("case", CASES)
def test_modules_tensors_ranks_and_scaling_are_those_of_peft(tmp_path: Path, case: str) -> None:
    saved_by_peft(CASES[case], tmp_path)
    # Not the model in memory: saving sorts the patterns, and the first that matches counts.
    model = PeftModel.from_pretrained(base_model(), tmp_path)
    adapter = read_adapter(tmp_path, MODEL, LIMITS)
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and "default" in module.lora_A
    }
    found = {
        f"model.layers.{entry.layer}.{block}.{entry.module}": entry
        for entry in adapter.modules
        for block in ("self_attn", "mlp")
        if (block == "mlp") == (entry.module in ("gate_proj", "up_proj", "down_proj"))
    }
    assert sorted(found) == sorted(layers)
    for name, entry in found.items():
        module = layers[name]
        assert entry.lora_rank == module.r["default"], name
        assert entry.scaling == module.scaling["default"], name
        for bits, linear in ((entry.a, module.lora_A), (entry.b, module.lora_B)):
            expected = linear["default"].weight.detach().numpy()
            assert np.array_equal(bits.view(np.float32), expected), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    keys = {"r": 4, "target_modules": ["q_proj"]}
    model = get_peft_model(
        base_model().to(dtype),
        LoraConfig(init_lora_weights=False, **keys),
        autocast_adapter_dtype=False,
    )
    model.save_pretrained(tmp_path)
    adapter = read_adapter(tmp_path, MODEL, LIMITS)
    assert f"torch.{adapter.dtype}" == str(dtype)
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"].weight
    assert np.array_equal(adapter.modules[0].a, weight.detach().view(torch.uint16).numpy())


@pytest.mark.parametrize(
    "keys",
    [
        {"bias": "lora_only"},
        {"modules_to_save": ["norm"]},
        {"trainable_token_indices": [1, 2]},
    ],
)
def test_what_peft_can_and_the_server_cannot_is_refused_by_key(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    saved_by_peft({"r": 4, "target_modules": ["q_proj"], **keys}, tmp_path)
    with pytest.raises(InvalidAdapter, match=next(iter(keys))):
        read_adapter(tmp_path, MODEL, LIMITS)
