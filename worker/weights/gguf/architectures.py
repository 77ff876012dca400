"""The architectures that are read of GGUF files: which family each is, and what it calls tensors.

Names are those of llama.cpp (gguf-py/gguf/tensor_mapping.py). Its converter also changes some
tensors (conversion/llama.py, conversion/gemma.py), which reading undoes: rows of Q and K take turns
where rotary embedding goes by neighbours, and norms that are stored less 1 have it added.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
_MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_NORMS_BEHIND = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_LLAMA = _ATTENTION | _MLP | _NORMS
_EXPERTS = {
    "mlp.experts.*.gate_proj": "ffn_gate_exps",
    "mlp.experts.*.up_proj": "ffn_up_exps",
    "mlp.experts.*.down_proj": "ffn_down_exps",
}

# Of the file, and no tensors of the model: the configuration is made of them.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

Change = Literal["none", "turns", "less one"]  # what reading undoes


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of `general.architecture`."""

    name: str
    causal_lm: str  # as `architectures` of config.json has it
    layer: dict[str, str] = field(repr=False)  # names inside a layer, by those of the family
    takes_turns: bool = False  # rows of Q and K
    adds_one: bool = False  # to the weights of all norms


@dataclass(frozen=True, slots=True)
class Source:
    """Which tensor of a file one of the family's is, or is part of."""

    name: str
    expert: int | None = None  # of a stack [experts, outputs, inputs]
    change: Change = "none"


ARCHITECTURES = {
    one.name: one
    for one in (
        Architecture("llama", "LlamaForCausalLM", _LLAMA, takes_turns=True),
        Architecture("smollm3", "SmolLM3ForCausalLM", _LLAMA, takes_turns=True),
        Architecture("granite", "GraniteForCausalLM", _LLAMA, takes_turns=True),
        Architecture("qwen2", "Qwen2ForCausalLM", _LLAMA),
        Architecture("qwen3", "Qwen3ForCausalLM", _LLAMA | _QK_NORMS),
        Architecture(
            "qwen3moe",
            "Qwen3MoeForCausalLM",
            _ATTENTION | _NORMS | _QK_NORMS | _EXPERTS | {"mlp.gate": "ffn_gate_inp"},
        ),
        Architecture("olmo2", "Olmo2ForCausalLM", _ATTENTION | _MLP | _QK_NORMS | _NORMS_BEHIND),
        Architecture(
            "gemma3",
            "Gemma3ForCausalLM",
            _LLAMA | _QK_NORMS | _NORMS_BEHIND | {"pre_feedforward_layernorm": "ffn_norm"},
            adds_one=True,
        ),
        Architecture(
            "phi3",
            "Phi3ForCausalLM",
            _NORMS
            | {
                "self_attn.qkv_proj": "attn_qkv",
                "self_attn.o_proj": "attn_output",
                "mlp.gate_up_proj": "ffn_up",
                "mlp.down_proj": "ffn_down",
            },
        ),
    )
}

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_TURNED = ("self_attn.q_proj", "self_attn.k_proj")


def find_architecture(name: str) -> Architecture:
    """Return an architecture by its name.

    Raises:
        ValueError: if it is not read; says which are.
    """
    found = ARCHITECTURES.get(name)
    if found is None:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"general.architecture: {ascii(name[:99])} is not one of {known}")
    return found


def source_of(name: str, architecture: Architecture) -> Source | None:
    """Return where one of the family's tensors lies, None if files of this kind have none such."""
    module, _, suffix = name.rpartition(".")
    layer = _LAYER.fullmatch(module)
    if layer is None:
        top = _TOP.get(module)
        change: Change = "less one" if architecture.adds_one and module == "model.norm" else "none"
        return None if top is None else Source(f"{top}.{suffix}", change=change)
    index, path = layer[1], layer[2]
    expert = _EXPERT.search(path)
    found = architecture.layer.get(_EXPERT.sub(".experts.*.", path))
    if found is None:
        return None
    change = "none"
    if architecture.takes_turns and path in _TURNED:
        change = "turns"
    elif architecture.adds_one and path.endswith("norm"):
        change = "less one"
    number = None if expert is None else int(expert[1])
    return Source(f"blk.{index}.{found}.{suffix}", number, change)
