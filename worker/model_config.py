"""The shape of a model, as its Hugging Face `config.json` says it.

Architectures: Llama, Mistral, Qwen2 and Qwen3, dense, with an lm_head or, to classify texts, with a
head called score in its place. Anything this reader does not understand is
refused with the key that says so: a model is never served on a guess.
"""

from dataclasses import dataclass
from typing import Literal

from worker.classifier_config import ClassifierConfig


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency and, for long contexts, how frequencies are scaled."""

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer."""

    architecture: Literal["llama", "mistral", "qwen2", "qwen3"]
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    dtype: str  # as stored: "bfloat16", "float16" or "float32"
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None = None
    classifier: ClassifierConfig | None = None  # of a head in place of lm_head


def check_length(model: ModelConfig, max_model_len: int) -> None:
    """Refuse lengths that the model was not made for.

    Attention here is always full, which equals sliding attention only within one window.
    """
    if max_model_len > model.max_position:
        raise ValueError(
            f"max_model_len {max_model_len} is over max_position_embeddings {model.max_position}"
        )
    if model.sliding_window is not None and max_model_len > model.sliding_window:
        raise ValueError(
            f"max_model_len {max_model_len} is over sliding_window {model.sliding_window}: "
            "sliding attention is not supported beyond its first window"
        )
