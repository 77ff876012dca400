"""`config.json` as written, and what all families read of it in the same way.

Reads both spellings of rotary embeddings: `rope_parameters` of transformers 5, and `rope_theta`
with `rope_scaling` before it. Where a key may be left out, its default is that of transformers.
"""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import msgspec

from worker.linears import Linear, expert_linears, separate_linears
from worker.model_config import Activation, ExpertsConfig, ModelConfig, RopeConfig

DTYPES = ("bfloat16", "float16", "float32")
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_LARGEST = 2**31 - 1  # of any size
_MOST_LAYERS = 2**16
_MOST_EXPERTS = 2**12  # a GPU's program holds one number for each
_LARGEST_VOCABULARY = 2**24  # as worker.sampling has it


class RopeFile(msgspec.Struct):
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
    short_factor: list[float] | None = None
    long_factor: list[float] | None = None
    full_attention: "RopeFile | None" = None  # these two instead of all else: by type of layer
    sliding_attention: "RopeFile | None" = None


class ConfigFile(msgspec.Struct):
    """`config.json` as written; what has no default must be there.

    A family that knows other keys, or takes other values where they are left out, reads a class
    of its own that is made of this one.
    """

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
    rope_parameters: RopeFile | None = None
    rope_scaling: RopeFile | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


def dense_config(
    file: ConfigFile,
    *,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    hidden_act: str | None = None,
    rope: RopeConfig | None = None,
) -> ModelConfig:
    """Return the shape of a decoder whose layers are attention and a gated MLP, as Llama's.

    Args:
        file: what was written.
        head_dim: where the file has none; None: what is left of the hidden size for each head.
        qkv_bias: whether these linears have biases.
        o_bias: likewise.
        mlp_bias: likewise.
        qk_norm: whether each head of Q and K is normed.
        hidden_act: where the file has it under another key.
        rope: where the file has it in another way.

    Raises:
        ValueError: naming the key that does not fit.
    """
    act = hidden_act or file.hidden_act
    require(act in ACTIVATIONS, f"hidden_act {act!r} is not one of {', '.join(ACTIVATIONS)}")
    own_head_dim = _head_dim(file, head_dim)
    num_kv_heads = file.num_key_value_heads or file.num_attention_heads
    require(
        num_kv_heads > 0 and file.num_attention_heads % num_kv_heads == 0,
        f"num_attention_heads {file.num_attention_heads} is not a multiple of "
        f"num_key_value_heads {num_kv_heads}",
    )
    require(0 <= file.rms_norm_eps < 1, f"rms_norm_eps {file.rms_norm_eps} is not between 0 and 1")
    dtype = file.dtype or file.torch_dtype or "float32"
    require(dtype in DTYPES, f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return ModelConfig(
        num_layers=positive("num_hidden_layers", file.num_hidden_layers, _MOST_LAYERS),
        hidden_size=file.hidden_size,
        intermediate_size=positive("intermediate_size", file.intermediate_size),
        num_heads=file.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=own_head_dim,
        vocab_size=positive("vocab_size", file.vocab_size, _LARGEST_VOCABULARY),
        max_position=positive("max_position_embeddings", file.max_position_embeddings),
        rms_norm_eps=file.rms_norm_eps,
        rope=rope or _rope(file),
        tie_word_embeddings=file.tie_word_embeddings,
        linears=separate_linears(qkv_bias=qkv_bias, o_bias=o_bias, mlp_bias=mlp_bias),
        qk_norm=qk_norm,
        dtype=dtype,
        bos_token_id=file.bos_token_id,
        activation=ACTIVATIONS[act],
    )


def with_experts(
    config: ModelConfig,
    experts: ExpertsConfig,
    linears_of: Callable[[int], Iterable[Linear]] = expert_linears,
) -> ModelConfig:
    """Return the shape of a model of which some layers have experts.

    Args:
        config: without that. Of its MLP, linears of "all" layers stay beside the experts, those of
            "dense" ones do not.
        experts: of these layers.
        linears_of: returns the linears of so many experts and their router.

    Raises:
        ValueError: if there are none or too many, or a row is to have more than there are.
    """
    positive("num_experts", experts.num_experts, _MOST_EXPERTS)
    top_k = positive("num_experts_per_tok", experts.top_k)
    require(
        top_k <= experts.num_experts,
        f"num_experts_per_tok {top_k} is over {experts.num_experts} experts",
    )
    has_dense = len(experts.layers) < config.num_layers
    kept = (one for one in config.linears if has_dense or one.in_layers != "dense")
    return replace(config, experts=experts, linears=(*kept, *linears_of(experts.num_experts)))


def with_window(
    config: ModelConfig, file: ConfigFile, slides: Callable[[int], bool]
) -> ModelConfig:
    """Return the shape of a model of which some layers see no more than a window.

    Args:
        config: without that.
        file: what was written; nothing slides without its `use_sliding_window`.
        slides: tells of a layer whether it does where `layer_types` says nothing.

    Raises:
        ValueError: if a layer is of a type that is not known, or the window is none.
    """
    if file.sliding_window is None or not file.use_sliding_window:
        return config
    types, num_layers = file.layer_types, config.num_layers
    if types is not None:
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        require(not unknown, f"layer_types {', '.join(unknown)} is not supported")
        require(len(types) == num_layers, f"layer_types has {len(types)} entries, not {num_layers}")
    sliding = tuple(
        layer
        for layer in range(num_layers)
        if (slides(layer) if types is None else types[layer] == "sliding_attention")
    )
    window = positive("sliding_window", file.sliding_window)
    return replace(config, sliding_window=window, sliding_layers=sliding) if sliding else config


def mixer_layers(
    file: ConfigFile, *, mixing: Collection[str], attending: Collection[str]
) -> tuple[int, ...]:
    """Return the layers that `layer_types` gives a mixer in place of attention.

    Args:
        file: what was written; its number of layers is bounded.
        mixing: the types of layers that have one, under all their names.
        attending: likewise of those that attend.

    Raises:
        ValueError: if a layer is of a type that is not known, or none attends.
    """
    types, num_layers = file.layer_types or [], file.num_hidden_layers
    unknown = sorted(set(types).difference(mixing, attending))
    require(not unknown, f"layer_types {', '.join(unknown)} is not supported")
    require(len(types) == num_layers, f"layer_types has {len(types)} entries, not {num_layers}")
    require(any(kind in attending for kind in types), "no layer attends: that is not supported")
    return tuple(at for at, kind in enumerate(types) if kind in mixing)


def multiplier(key: str, value: float) -> float:
    """Return a number that something is multiplied by.

    Raises:
        ValueError: if it is not finite and above 0.
    """
    require(0 < value < math.inf, f"{key} {value} is not a number above 0")
    return value


def require(condition: bool, complaint: str) -> None:
    """Refuse a file unless a condition holds.

    Raises:
        ValueError: with the complaint.
    """
    if not condition:
        raise ValueError(f"config.json: {complaint}")


def positive(key: str, value: int, largest: int = _LARGEST) -> int:
    """Return the value of a key.

    Raises:
        ValueError: if it is not between 1 and `largest`.
    """
    require(value > 0, f"{key} {value} is not positive")
    require(value <= largest, f"{key} is over {largest}")
    return value


def _head_dim(file: ConfigFile, default: int | None) -> int:
    positive("hidden_size", file.hidden_size)
    num_heads = positive("num_attention_heads", file.num_attention_heads)
    head_dim = file.head_dim
    if head_dim is None:
        head_dim = default or file.hidden_size // num_heads
    require(head_dim > 0 and head_dim % 2 == 0, f"head_dim {head_dim} is not positive and even")
    return positive("head_dim", head_dim)


def ropes_by_type(
    file: ConfigFile, *, full_theta: float, sliding_theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotary embedding of layers that see everything, and of those that slide.

    Before transformers 5 `rope_theta` and `rope_scaling` were those of full layers alone.

    Args:
        file: what was written.
        full_theta: base frequency of full layers, where `rope_parameters` has none.
        sliding_theta: likewise of layers that slide.

    Raises:
        ValueError: naming the key that does not fit.
    """
    nested = file.rope_parameters
    if nested is None:
        nested = RopeFile(full_attention=file.rope_scaling)
    else:
        flat = nested.rope_type or nested.type or nested.rope_theta
        require(not flat, "rope_parameters has no full_attention and sliding_attention")
    by_type = nested.full_attention or RopeFile(), nested.sliding_attention or RopeFile()
    full, sliding = (
        _one_rope(rope, file, theta)
        for rope, theta in zip(by_type, (full_theta, sliding_theta), strict=True)
    )
    return full, sliding


def _rope(file: ConfigFile) -> RopeConfig:
    """Return the rotary embedding that all layers have."""
    rope = file.rope_parameters or file.rope_scaling or RopeFile()
    # A nested `rope_parameters` (one per layer type) would decode as an empty one.
    require(
        file.rope_parameters is None or bool(rope.rope_type or rope.type or rope.rope_theta),
        "rope_parameters has neither rope_type nor rope_theta",
    )
    return _one_rope(rope, file, file.rope_theta or 10_000.0)


def rotary_factor(file: ConfigFile, written: RopeFile, head_dim: int, default: float) -> float:
    """Return how much of a head rotates.

    Raises:
        ValueError: if that is not an even number of its features.
    """
    part = written.partial_rotary_factor or file.partial_rotary_factor or default
    num_features = int(head_dim * part) if 0 < part <= 1 else 0
    require(
        num_features > 0 and num_features % 2 == 0,
        f"partial_rotary_factor {part} does not leave an even part of head_dim {head_dim}",
    )
    return part


def _one_rope(rope: RopeFile, file: ConfigFile, default_theta: float) -> RopeConfig:
    for part in (rope.partial_rotary_factor, file.partial_rotary_factor):
        require(part in (None, 1.0), f"partial_rotary_factor {part} is not supported")
    kind = rope.rope_type or rope.type or "default"
    theta = rope.rope_theta or default_theta
    require(theta > 1, f"rope_theta {theta} is not above 1")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"config.json: rope_type {kind!r} is not supported")
    if rope.factor is None or rope.factor < 1:
        raise ValueError(f"config.json: rope factor {rope.factor} is not at least 1")
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=rope.factor)
    original = positive(
        "original_max_position_embeddings",
        rope.original_max_position_embeddings or file.max_position_embeddings,
    )
    if kind == "yarn":
        return _yarn(rope, theta, rope.factor, original)
    if rope.low_freq_factor is None or rope.high_freq_factor is None:
        raise ValueError("config.json: llama3 rope needs low_freq_factor and high_freq_factor")
    require(
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


def _yarn(rope: RopeFile, theta: float, factor: float, original: int) -> RopeConfig:
    for key in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
        value = getattr(rope, key)
        require(value is None or value >= 0, f"rope {key} {value} is negative")
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
        truncate=rope.truncate,
        attention_factor=attention_factor,
    )
