"""A tiny model of each architecture that is read of GGUF files, by its name there."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

_COMMON = {
    "vocab_size": 131,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_SMALL = {"hidden_size": 96, "intermediate_size": 96, "num_attention_heads": 6}
_SMALL |= {"num_key_value_heads": 3, "head_dim": 16}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}
_YARN["original_max_position_embeddings"] = 128
_LONG = {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
_LONG |= {"short_factor": [1.0 + i / 8 for i in range(6)]}
_LONG |= {"long_factor": [1.0 + i for i in range(6)], "original_max_position_embeddings": 256}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "Llama",
        _SMALL | {"attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3},
    ),
    "smollm3": ("SmolLM3", _SMALL | {"tie_word_embeddings": True}),
    "granite": (
        "Granite",
        {
            "hidden_size": 96,
            "intermediate_size": 80,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.375,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": (
        "Qwen2",
        {
            "hidden_size": 96,
            "intermediate_size": 80,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "rope_parameters": _YARN,
        },
    ),
    "qwen3": ("Qwen3", _SMALL | {"tie_word_embeddings": True}),
    "qwen3moe": (
        "Qwen3Moe",
        _SMALL
        | {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "olmo2": ("Olmo2", _SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "gemma3": (
        "Gemma3",
        _SMALL
        | {
            "num_hidden_layers": 7,
            "sliding_window": 30,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "phi3": (
        "Phi3",
        _SMALL | {"sliding_window": 40, "rope_parameters": _LONG},
    ),
}


def build(architecture: str) -> PreTrainedModel:
    """Return the model with random weights, in float32."""
    name, keys = KINDS[architecture]
    if architecture == "phi3":
        keys = keys | {"original_max_position_embeddings": 256}
    suffix = "Text" if architecture == "gemma3" else ""
    config = getattr(transformers, f"{name}{suffix}Config")(**(_COMMON | keys))
    if architecture in ("granite", "olmo2", "qwen2"):
        config.head_dim = config.hidden_size // config.num_attention_heads
    torch.manual_seed(7)
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            is_norm = "norm" in key
            mean = 0.0 if not is_norm or architecture == "gemma3" else 1.0
            parameter.normal_(mean, 0.2 if is_norm else 0.15)
    return model
