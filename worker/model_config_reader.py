"""Reads a `ModelConfig` from a Hugging Face directory: `config.json` and `generation_config.json`.

Reads both spellings of rotary embeddings: `rope_parameters` of transformers 5, and `rope_theta`
with `rope_scaling` before it. Where a key may be left out, its default is that of transformers.
"""

import math
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from worker.classifier_config import ClassifierConfig, read_classifier, read_num_labels
from worker.model_config import ModelConfig, RopeConfig
from worker.regular_file import read_bounded

_Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]
_T = TypeVar("_T", bound=msgspec.Struct)

_ARCHITECTURES: dict[str, _Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_CLASSIFIERS = {
    name.replace("CausalLM", "SequenceClassification"): architecture
    for name, architecture in _ARCHITECTURES.items()
}
_DTYPES = ("bfloat16", "float16", "float32")
_MAX_BYTES = 2**22  # of a file
_LARGEST = 2**31 - 1  # of any size
_LARGEST_VOCABULARY = 2**24  # as worker.sampling has it
# A model with one of these keys is of a kind that the forward pass does not compute.
_FOREIGN_KEYS = (
    "quantization_config",
    "compression_config",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "logit_scale",
    "embedding_multiplier",
    "residual_multiplier",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)


class _Rope(msgspec.Struct):
    """`rope_parameters` or `rope_scaling` as written."""

    rope_type: str | None = None
    type: str | None = None  # as spelled before transformers 4.43
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class _Generation(msgspec.Struct):
    """The part of `generation_config.json` that matters here."""

    eos_token_id: int | list[int] | None = None


class _File(msgspec.Struct):
    """`config.json` as written; what has no default must be there."""

    architectures: list[str]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    sliding_window: int | None | msgspec.UnsetType = msgspec.UNSET
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


def read_model_config(model_dir: Path) -> ModelConfig:
    """Return the shape of the model in a directory.

    Raises:
        OSError: if there is no `config.json`, or it cannot be read.
        ValueError: if the model is of a kind that cannot be served; names the key that says so.
    """
    path = model_dir / "config.json"
    file, keys = _decode(path, _File)
    for key in _FOREIGN_KEYS:
        _require(keys.get(key) is None, f"{key} is not supported")
    _require(len(file.architectures) == 1, f"architectures {file.architectures} is not one name")
    name = file.architectures[0]
    architecture = _ARCHITECTURES.get(name) or _CLASSIFIERS.get(name)
    if architecture is None:
        raise ValueError(
            f"architectures: {name} is not one of {', '.join((*_ARCHITECTURES, *_CLASSIFIERS))}"
        )
    _require(file.hidden_act == "silu", f"hidden_act {file.hidden_act!r} is not silu")
    head_dim = _head_dim(file, architecture)
    num_kv_heads = file.num_key_value_heads or file.num_attention_heads
    _require(
        num_kv_heads > 0 and file.num_attention_heads % num_kv_heads == 0,
        f"num_attention_heads {file.num_attention_heads} is not a multiple of "
        f"num_key_value_heads {num_kv_heads}",
    )
    _require(0 <= file.rms_norm_eps < 1, f"rms_norm_eps {file.rms_norm_eps} is not between 0 and 1")
    dtype = file.dtype or file.torch_dtype or "float32"
    _require(dtype in _DTYPES, f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    has_attention_bias = file.attention_bias and architecture in ("llama", "qwen3")
    return ModelConfig(
        architecture=architecture,
        num_layers=_positive("num_hidden_layers", file.num_hidden_layers),
        hidden_size=file.hidden_size,
        intermediate_size=_positive("intermediate_size", file.intermediate_size),
        num_heads=file.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_positive("vocab_size", file.vocab_size, _LARGEST_VOCABULARY),
        max_position=_positive("max_position_embeddings", file.max_position_embeddings),
        rms_norm_eps=file.rms_norm_eps,
        rope=_rope(file),
        tie_word_embeddings=file.tie_word_embeddings and name in _ARCHITECTURES,
        qkv_bias=architecture == "qwen2" or has_attention_bias,
        o_bias=has_attention_bias,
        mlp_bias=file.mlp_bias and architecture == "llama",
        qk_norm=architecture == "qwen3",
        sliding_window=_sliding_window(file, architecture),
        dtype=dtype,
        bos_token_id=file.bos_token_id,
        eos_token_ids=_eos_token_ids(model_dir, file),
        pad_token_id=_pad_token_id(keys),
        classifier=_classifier(keys) if name in _CLASSIFIERS else None,
    )


def _decode(path: Path, kind: type[_T]) -> tuple[_T, dict[str, Any]]:
    data = read_bounded(path, _MAX_BYTES)
    try:
        return msgspec.json.decode(data, type=kind), msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: {error}") from error


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise ValueError(f"config.json: {complaint}")


def _positive(key: str, value: int, largest: int = _LARGEST) -> int:
    _require(value > 0, f"{key} {value} is not positive")
    _require(value <= largest, f"{key} is over {largest}")
    return value


def _head_dim(file: _File, architecture: _Architecture) -> int:
    _positive("hidden_size", file.hidden_size)
    num_heads = _positive("num_attention_heads", file.num_attention_heads)
    head_dim = file.head_dim
    if head_dim is None:
        head_dim = 128 if architecture == "qwen3" else file.hidden_size // num_heads
    _require(head_dim > 0 and head_dim % 2 == 0, f"head_dim {head_dim} is not positive and even")
    return _positive("head_dim", head_dim)


def _rope(file: _File) -> RopeConfig:
    rope = file.rope_parameters or file.rope_scaling or _Rope()
    for factor in (rope.partial_rotary_factor, file.partial_rotary_factor):
        _require(factor in (None, 1.0), f"partial_rotary_factor {factor} is not supported")
    # A nested `rope_parameters` (one per layer type) would decode as an empty one.
    _require(
        file.rope_parameters is None or bool(rope.rope_type or rope.type or rope.rope_theta),
        "rope_parameters has neither rope_type nor rope_theta",
    )
    kind = rope.rope_type or rope.type or "default"
    theta = rope.rope_theta or file.rope_theta or 10_000.0
    _require(theta > 1, f"rope_theta {theta} is not above 1")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"config.json: rope_type {kind!r} is not supported")
    if rope.factor is None or rope.factor < 1:
        raise ValueError(f"config.json: rope factor {rope.factor} is not at least 1")
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=rope.factor)
    original = _positive(
        "original_max_position_embeddings",
        rope.original_max_position_embeddings or file.max_position_embeddings,
    )
    if kind == "yarn":
        return _yarn(rope, theta, rope.factor, original)
    if rope.low_freq_factor is None or rope.high_freq_factor is None:
        raise ValueError("config.json: llama3 rope needs low_freq_factor and high_freq_factor")
    _require(
        0 < rope.low_freq_factor < rope.high_freq_factor,
        f"low_freq_factor {rope.low_freq_factor} is not below "
        f"high_freq_factor {rope.high_freq_factor}",
    )
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=rope.factor,
        original_max_position=original,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
    )


def _yarn(rope: _Rope, theta: float, factor: float, original: int) -> RopeConfig:
    _require(rope.truncate, "rope truncate false is not supported")
    for key in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
        value = getattr(rope, key)
        _require(value is None or value >= 0, f"rope {key} {value} is negative")
    attention_factor = rope.attention_factor
    if attention_factor is None and rope.mscale and rope.mscale_all_dim:
        log = math.log(factor)
        attention_factor = (0.1 * rope.mscale * log + 1) / (0.1 * rope.mscale_all_dim * log + 1)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=rope.beta_fast or 32.0,
        beta_slow=rope.beta_slow or 1.0,
        attention_factor=attention_factor,
    )


def _sliding_window(file: _File, architecture: _Architecture) -> int | None:
    """Return the window if any layer slides."""
    window = file.sliding_window
    if architecture == "llama":
        _require(
            window is msgspec.UNSET or window is None,
            f"sliding_window {window} is not known to LlamaForCausalLM",
        )
        return None
    if window is msgspec.UNSET:
        window = 4096
    if window is None:
        return None
    if architecture == "mistral":
        return _positive("sliding_window", window)
    layer_types = file.layer_types
    slides = file.max_window_layers < file.num_hidden_layers
    if layer_types is not None:
        slides = "sliding_attention" in layer_types
        unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
        _require(not unknown, f"layer_types {', '.join(unknown)} is not supported")
    return _positive("sliding_window", window) if file.use_sliding_window and slides else None


def _eos_token_ids(model_dir: Path, file: _File) -> tuple[int, ...]:
    """Return every token that ends an answer, of either file, in ascending order."""
    token_ids = set(_as_list(file.eos_token_id))
    path = model_dir / "generation_config.json"
    if path.exists():
        token_ids.update(_as_list(_decode(path, _Generation)[0].eos_token_id))
    for token_id in token_ids:
        _require(0 <= token_id < file.vocab_size, f"eos_token_id {token_id} is not a token")
    return tuple(sorted(token_ids))


def _pad_token_id(keys: dict[str, Any]) -> int | None:
    value = keys.get("pad_token_id")
    return value if type(value) is int else None


def _classifier(keys: dict[str, Any]) -> ClassifierConfig:
    try:
        return read_classifier(keys, read_num_labels(keys))
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from error


def _as_list(token_ids: int | list[int] | None) -> list[int]:
    if token_ids is None:
        return []
    return token_ids if isinstance(token_ids, list) else [token_ids]
