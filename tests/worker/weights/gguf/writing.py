"""Writes a tiny model as llama.cpp's converter would, and says what it means.

Names are those of gguf's own map, and codes mean what gguf's own `dequantize` makes of them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from transformers import PreTrainedModel

# Where a block has numbers of float16, which random bytes would make anything of.
_SCALES = {
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
}
_PLAIN = {Type.F32: np.float32, Type.F16: np.float16}
BLOCKS = (
    *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0),
    *(Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K),
)
TYPES = (*BLOCKS, Type.F16, Type.BF16, Type.F32)

# Keys of config.json and what they are called, where one is the other.
_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
TURNED = ("llama", "smollm3", "granite")


def write_model(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    kind: Type,
    *,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    keys: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Write a model; return what its tensors mean, as a state dict."""
    writer = gguf.GGUFWriter(path, architecture, **options)
    for key, value in {**_shape(model, architecture), **(keys or {})}.items():
        name = f"{architecture}.{key}"
        match value:
            case str():
                writer.add_string(name, value)
            case float():
                writer.add_float32(name, value)
            case int():
                writer.add_uint32(name, value)
    if tokenizer is not None:
        tokenizer(writer)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    meant = {}
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        model.config.num_hidden_layers,
    )
    for name, tensor in state.items():
        parts = []
        for of_file, part in _of_file(names, name, tensor.float()):
            changed = _changed(part, name, model, architecture)
            stored = _add(writer, of_file, changed, kind)
            parts.append(_changed_back(stored, name, model, architecture))
        meant[name] = torch.cat(parts, dim=-2 if len(parts) > 1 else 0)
    for name, numbers in _rope_tensors(model).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def _shape(model: PreTrainedModel, architecture: str) -> dict[str, Any]:
    config = model.config
    keys = {name: getattr(config, key) for key, name in _KEYS.items() if hasattr(config, key)}
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None and architecture != "granite":
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    keys["rope.freq_base"] = float(rope["rope_theta"])
    part = rope.get("partial_rotary_factor") or 1.0
    keys["rope.dimension_count"] = int(part * head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] in ("yarn", "longrope"):
        original = rope["original_max_position_embeddings"]
        keys["rope.scaling.original_context_length"] = original
    if architecture in ("gemma3", "phi3"):
        keys["attention.sliding_window"] = config.sliding_window or 0
    return keys


def _of_file(names: Any, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return the tensors of the file that one of the model's is written as."""
    module, _, suffix = name.rpartition(".")
    if name.endswith("mlp.experts.gate_up_proj"):
        layer = name.split(".")[2]
        halves = zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True)
        return [(f"blk.{layer}.ffn_{which}_exps.weight", half) for which, half in halves]
    if name.endswith("mlp.experts.down_proj"):
        return [(f"blk.{name.split('.')[2]}.ffn_down_exps.weight", tensor)]
    found = names.get_name(module)
    assert found is not None, f"{name} has no name"
    return [(f"{found}.{suffix}", tensor)]


def _is_turned(name: str, architecture: str) -> bool:
    return architecture in TURNED and (".q_proj." in name or ".k_proj." in name)


def _changed(tensor: Tensor, name: str, model: Any, architecture: str) -> Tensor:
    """Return what the converter makes of a tensor."""
    if _is_turned(name, architecture):
        config = model.config
        is_q = ".q_proj." in name
        heads = config.num_attention_heads if is_q else config.num_key_value_heads
        halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    return tensor + 1 if architecture == "gemma3" and "norm" in name else tensor


def _changed_back(tensor: Tensor, name: str, model: Any, architecture: str) -> Tensor:
    if not _is_turned(name, architecture):
        return tensor - 1 if architecture == "gemma3" and "norm" in name else tensor
    order = _changed(torch.arange(len(tensor)), name, model, architecture)
    return tensor[order.argsort()]


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: Type) -> Tensor:
    """Add a tensor, of another type where its rows are not whole blocks; return its meaning."""
    numbers = tensor.contiguous().numpy()
    if tensor.dim() == 1:
        kind = Type.F32
    if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = Type.Q8_0 if tensor.shape[-1] % 32 == 0 else Type.F16
    if kind in _PLAIN:
        numbers = numbers.astype(_PLAIN[kind])
        writer.add_tensor(name, numbers)
        return torch.from_numpy(numbers.astype(np.float32))
    stored = random_blocks(kind, numbers.shape) if kind in _SCALES else gguf.quantize(numbers, kind)
    writer.add_tensor(name, stored, raw_dtype=kind)
    return torch.from_numpy(gguf.dequantize(stored, kind).copy())


def random_blocks(kind: Type, shape: tuple[int, ...]) -> Any:
    """Return blocks of any codes, with scales that make weights of a tenth or so."""
    of, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(shape[0])
    blocks = random.integers(0, 256, (int(np.prod(shape)) // of, size), dtype=np.uint8)
    for at in _SCALES[kind]:
        scales = random.uniform(2e-5, 2e-4, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*shape[:-1], -1)


def _rope_tensors(model: Any) -> dict[str, Any]:
    """Return the tensors of factors that the converter makes of some ropes."""
    rope = model.config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{which}.weight": np.array(rope[f"{which}_factor"], np.float32)
            for which in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    plain = rope["rope_theta"] ** -(np.arange(0, model.config.head_dim, 2) / model.config.head_dim)
    scaled = model.model.rotary_emb.inv_freq.numpy()
    return {"rope_freqs.weight": (plain / scaled).astype(np.float32)}
