"""Says what a GGUF file's metadata says as a Hugging Face `config.json` would.

What a model may be is judged by who reads that. Here each key of the architecture's is either
said in those words or refused by its name: none is passed over that may change what is computed.
Keys and their defaults are llama.cpp's (src/llama-model.cpp, gguf-py/gguf/constants.py).
"""

import math
import struct
from collections.abc import Callable
from typing import Any

from worker.regular_file import open_regular_file
from worker.weights.gguf.architectures import Architecture, find_architecture
from worker.weights.gguf.files import Gguf

Document = dict[str, Any]

# Keys that change nothing, with the values that they may have; None: any.
_NEUTRAL: dict[str, tuple[object, ...] | None] = {
    "vocab_size": None,  # the embedding says it
    "tensor_data_layout": None,
    "pooling_type": None,
    "rope.scaling.finetuned": None,
    "attention.causal": (True,),
    "attention.value_length": None,  # looked at beside key_length
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "nextn_predict_layers": (0,),
    "rope.scale_linear": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "attention.sliding_window": (0,),
}
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_ROPE_FREQS = "rope_freqs.weight"
_LARGEST_ROPE = 2**16  # numbers of a tensor of factors
_LLAMA3_CONTEXT = 8192  # that llama.cpp's converter counts from, whatever the model was made for
_LLAMA3_BAND = 1.0, 4.0
_GEMMA3_27B = 62  # layers; llama.cpp tells by them that queries are scaled as below

# What ends an answer whatever the file says: control tokens, as llama.cpp finds them by name
# (special_eog_ids in src/llama-vocab.cpp), of the families that are read here.
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"),
    *("<|endoftext|>", "<|end_of_text|>"),
)
_CONTROL = 3  # a type of token
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


class _Said:
    """The keys of one architecture, without its name before them."""

    def __init__(self, gguf: Gguf, architecture: Architecture) -> None:
        self.gguf = gguf
        self.prefix = f"{architecture.name}."

    def integer(self, key: str, default: int | None = None) -> int:
        return self.gguf.integer(self.prefix + key, default)

    def number(self, key: str, default: float | None = None) -> float:
        return self.gguf.number(self.prefix + key, default)

    def has(self, key: str) -> bool:
        return self.prefix + key in self.gguf

    def refusal(self, key: str, complaint: str) -> ValueError:
        return self.gguf.refusal(self.prefix + key, complaint)


def config_document(gguf: Gguf) -> Document:
    """Return what `config.json` of the same model says.

    Raises:
        OSError: if tensors of factors cannot be read.
        ValueError: if the file has not all keys, or one that is not understood; names it.
    """
    architecture = architecture_of(gguf)
    said = _Said(gguf, architecture)
    document = _common(said) | {"architectures": [architecture.causal_lm]}
    if not all(place.info.type.is_plain for place in gguf.tensors.values()):
        document["quantization_config"] = {"quant_method": "gguf"}
    own = _OWN.get(architecture.name)
    if own is not None:
        document |= own(said, document)
    for key in gguf.unasked(said.prefix):
        allowed = _NEUTRAL.get(key.removeprefix(said.prefix), ())
        value = gguf.value(key)
        if allowed is not None and value not in allowed:
            raise gguf.refusal(key, f"{str(value)[:99]} is not supported")
    return document


def architecture_of(gguf: Gguf) -> Architecture:
    """Return which architecture a file is of.

    Raises:
        ValueError: if it does not say so, or it is none that is read.
    """
    name = gguf.text("general.architecture")
    try:
        return find_architecture(name)
    except ValueError as error:
        raise ValueError(f"{gguf.path.name}: {error}") from None


def generation_document(gguf: Gguf) -> Document:
    """Return what `generation_config.json` of the same model says.

    Raises:
        ValueError: if a key is not what it must be.
    """
    ends = {
        gguf.integer(key)
        for name in ("eos", "eot", "eom")
        if (key := f"tokenizer.ggml.{name}_token_id") in gguf
    }
    tokens, types = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
    if tokens in gguf and types in gguf:
        told = zip(gguf.texts(tokens), gguf.integers(types), strict=False)
        named = enumerate(told)
        ends.update(i for i, (text, kind) in named if kind == _CONTROL and text in _ENDS)
    document: Document = {"eos_token_id": sorted(ends)} if ends else {}
    for key, name in _SAMPLING.items():
        if (whole := f"general.sampling.{key}") in gguf:
            document[name] = gguf.integer(whole) if key == "top_k" else gguf.number(whole)
    return document


def _common(said: _Said) -> Document:
    gguf = said.gguf
    heads = said.integer("attention.head_count")
    hidden = said.integer("embedding_length")
    if not 0 < heads <= hidden:
        raise said.refusal("attention.head_count", f"{heads} heads of {hidden} features")
    head_dim = said.integer("attention.key_length", hidden // heads)
    if said.integer("attention.value_length", head_dim) != head_dim:
        raise said.refusal("attention.value_length", f"it is not key_length, {head_dim}")
    rotates = said.integer("rope.dimension_count", head_dim)
    if rotates != head_dim and said.prefix != "phi3.":
        raise said.refusal("rope.dimension_count", f"it is {rotates}, and a head has {head_dim}")
    embedding = gguf.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.info.shape) != 2:
        raise ValueError(f"{gguf.path.name}: there is no tensor {_EMBEDDING} of two dimensions")
    tensors = gguf.tensors
    document: Document = {
        "hidden_size": hidden,
        "intermediate_size": said.integer("feed_forward_length"),
        "num_hidden_layers": said.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": said.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.info.shape[0],
        "max_position_embeddings": said.integer("context_length"),
        "rms_norm_eps": said.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": _HEAD not in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "rope_theta": said.number("rope.freq_base", 10_000.0),
    }
    scaling = _rope_scaling(said, rotates)
    if scaling is not None:
        document["rope_scaling"] = scaling
    for name in ("bos", "eos", "pad"):
        key = f"tokenizer.ggml.{'padding' if name == 'pad' else name}_token_id"
        if key in gguf:
            document[f"{name}_token_id"] = gguf.integer(key)
    return document


def _rope_scaling(said: _Said, rotates: int) -> Document | None:
    """Return how rotary frequencies are scaled, None if they are not."""
    key = said.prefix + "rope.scaling.type"
    kind = said.gguf.text(key) if key in said.gguf else "none"
    if _ROPE_FREQS in said.gguf.tensors:
        if kind != "none":
            raise said.refusal("rope.scaling.type", f"{kind!r} beside {_ROPE_FREQS}")
        return _llama3(said, rotates)
    match kind:
        case "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": said.number("rope.scaling.factor")}
        case "yarn":
            scaling: Document = {"rope_type": "yarn", "factor": said.number("rope.scaling.factor")}
            original = "rope.scaling.original_context_length"
            scaling["original_max_position_embeddings"] = said.integer(original)
            for name in ("beta_fast", "beta_slow"):
                if said.has(f"rope.scaling.yarn_{name}"):
                    scaling[name] = said.number(f"rope.scaling.yarn_{name}")
            return scaling
        case "longrope" if said.prefix == "phi3.":
            return None  # its tensors say it
    raise said.refusal("rope.scaling.type", f"{kind[:99]!r} is not supported")


def _llama3(said: _Said, rotates: int) -> Document:
    """Return the llama3 rope of which a file has what each frequency is divided by.

    Raises:
        ValueError: if those are not the divisors of one with the band that all models have.
    """
    factors = _floats(said.gguf, _ROPE_FREQS)
    theta = said.number("rope.freq_base", 10_000.0)
    low, high = _LLAMA3_BAND
    factor = max(factors)
    expected = []
    for pair in range(rotates // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / rotates) if theta > 0 else math.nan
        blend = (_LLAMA3_CONTEXT / wavelength - low) / (high - low)
        blend = min(1.0, max(0.0, blend))
        expected.append(1 / ((1 - blend) / factor + blend))
    is_close = len(factors) == len(expected) and all(
        math.isclose(one, other, rel_tol=1e-4)
        for one, other in zip(factors, expected, strict=False)
    )
    if not is_close or factor < 1:
        raise ValueError(
            f"{said.gguf.path.name}: tensor {_ROPE_FREQS} is not what Llama 3 makes of a context "
            f"of {_LLAMA3_CONTEXT}: other factors are not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _floats(gguf: Gguf, name: str) -> list[float]:
    """Return the numbers of a small tensor of one dimension, stored as they are."""
    place = gguf.tensors[name]
    info = place.info
    (count, *others) = info.shape
    if others or info.type.name != "F32" or count > _LARGEST_ROPE:
        raise ValueError(f"{place.file.name}: tensor {name} is no row of float32")
    with open_regular_file(place.file) as (file, _):
        file.seek(info.start)
        found = struct.unpack(f"<{count}f", file.read(info.num_bytes))
    if not all(0 < one < math.inf for one in found):
        raise ValueError(f"{place.file.name}: tensor {name} has numbers that are not above 0")
    return list(found)


def _granite(said: _Said, document: Document) -> Document:
    return {
        "attention_multiplier": said.number("attention.scale", document["head_dim"] ** -0.5),
        "embedding_multiplier": said.number("embedding_scale", 1.0),
        "residual_multiplier": said.number("residual_scale", 1.0),
        "logits_scaling": said.number("logit_scale", 1.0),
    }


def _gemma3(said: _Said, document: Document) -> Document:
    scalar = document["head_dim"]
    if document["num_hidden_layers"] == _GEMMA3_27B:
        scalar = document["hidden_size"] / document["num_attention_heads"]
    return {
        "rope_theta": said.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": said.number("rope.freq_base_swa", 10_000.0),
        "sliding_window": said.integer("attention.sliding_window"),
        "sliding_window_pattern": said.integer("attention.sliding_window_pattern", 6),
        "query_pre_attn_scalar": scalar,
    }


def _qwen3moe(said: _Said, document: Document) -> Document:
    return {
        "num_experts": said.integer("expert_count"),
        "num_experts_per_tok": said.integer("expert_used_count"),
        "moe_intermediate_size": said.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # to llama.cpp all are
    }


def _phi3(said: _Said, document: Document) -> Document:
    head_dim, rotates = document["head_dim"], said.integer("rope.dimension_count")
    original = said.integer(
        "rope.scaling.original_context_length", document["max_position_embeddings"]
    )
    window = said.integer("attention.sliding_window", 0)
    own: Document = {
        "partial_rotary_factor": rotates / head_dim,
        "original_max_position_embeddings": original,
        "sliding_window": window or None,
    }
    names = {name: f"rope_factors_{name}.weight" for name in ("short", "long")}
    there = [name in said.gguf.tensors for name in names.values()]
    if any(there):
        if not all(there):
            raise ValueError(
                f"{said.gguf.path.name}: one of {', '.join(names.values())} is missing"
            )
        said.number("rope.scaling.attn_factor", 1.0)  # which the formula makes of the lengths
        factors = {f"{name}_factor": _floats(said.gguf, of) for name, of in names.items()}
        own["rope_scaling"] = {"rope_type": "longrope", **factors}
    return own


_OWN: dict[str, Callable[[_Said, Document], Document]] = {
    "granite": _granite,
    "gemma3": _gemma3,
    "qwen3moe": _qwen3moe,
    "phi3": _phi3,
}
