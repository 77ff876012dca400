"""A checkpoint of random numbers on a disk, and adapters for it as they come out of the pool."""

import json
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.torch import save_file

from cluster.adapters.adapter import Adapter, Bits, LoraModule
from cluster.adapters.sharding import cut
from tests.gpu.place import Place
from tests.llama_linears import LINEAR_MODULES
from tests.whole_modules import module_shape
from worker.lora.shard import AdapterShard
from worker.model_config import ModelConfig
from worker.weights.partition import partition

_DTYPE = torch.bfloat16
_LAYERS_OF_A_FILE = 8


def write_checkpoint(place: Place, config: ModelConfig, path: Path) -> None:
    """Write a Llama of such a shape into a directory that is there."""
    (path / "config.json").write_text(json.dumps(_config_file(config)))
    hidden, files = config.hidden_size, {}

    def normal(*shape: int) -> torch.Tensor:
        scale = shape[-1] ** -0.5
        return torch.empty(shape, dtype=_DTYPE, device=place.device).normal_(0, scale).cpu()

    def ones() -> torch.Tensor:
        return torch.ones(hidden, dtype=_DTYPE)

    vocabulary = (config.vocab_size, hidden)
    files["ends"] = {
        "model.embed_tokens.weight": normal(*vocabulary) * hidden**0.5,
        "lm_head.weight": normal(*vocabulary),
        "model.norm.weight": ones(),
    }
    for layer in range(config.num_layers):
        tensors = files.setdefault(f"layers-{layer // _LAYERS_OF_A_FILE}", {})
        prefix = f"model.layers.{layer}"
        for module in LINEAR_MODULES:
            part = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            shape = module_shape(config, module)
            tensors[f"{prefix}.{part}.{module}.weight"] = normal(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = ones()
    index: dict[str, str] = {}
    for name, tensors in files.items():
        save_file(tensors, path / f"{name}.safetensors")
        index |= dict.fromkeys(tensors, f"{name}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def random_shard(config: ModelConfig, lora_rank: int, seed: int) -> AdapterShard:
    """Return an adapter of all linears as the only rank gets it from the pool."""
    generator = torch.Generator().manual_seed(seed)

    def bits(*shape: int, scale: float) -> Bits:
        values = torch.empty(shape).normal_(0, scale, generator=generator).to(_DTYPE)
        return cast("Bits", values.view(torch.int16).numpy().view(np.uint16))

    modules = []
    for module in LINEAR_MODULES:
        outputs, inputs = module_shape(config, module)
        a = bits(lora_rank, inputs, scale=inputs**-0.5)
        b = bits(outputs, lora_rank, scale=0.01)
        modules.append((module, a, b))
    layers = tuple(
        LoraModule(layer, module, 1.0, a, b)
        for layer in range(config.num_layers)
        for module, a, b in modules
    )
    return cut(Adapter(f"{seed:064x}", "", config, "bfloat16", layers), partition(config, 1, 0))


def _config_file(config: ModelConfig) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 1,
    }
