"""The shape of a model, as its Hugging Face `config.json` says it."""

from dataclasses import dataclass
from typing import Literal

from worker.classifier_config import ClassifierConfig
from worker.linears import Layers, Linear
from worker.mixers.config import MixerConfig
from worker.quantization.formats import Quantization

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency and, for long contexts, how frequencies are scaled."""

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    original_max_position: int = 0  # llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: where the blend begins and ends are whole pairs
    attention_factor: float | None = None  # yarn, longrope; None: by their formulas
    short_factors: tuple[float, ...] = ()  # longrope: that frequencies are divided by
    long_factors: tuple[float, ...] = ()  # likewise, if a context may be over the original
    rotary_factor: float = 1.0  # of the features of a head that rotate, the first of them

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many features of a head rotate."""
        return int(head_dim * self.rotary_factor)


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """What a checkpoint calls the norms of a layer; None where it has none."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None  # of what joins the residual
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    def names(self) -> tuple[str, ...]:
        """Return those that there are."""
        every = self.before_attention, self.after_attention, self.before_mlp, self.after_mlp
        return tuple(name for name in every if name is not None)


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """The gate of gpt-oss's experts: gate * sigmoid(alpha gate) * (up + 1), both cut before."""

    alpha: float
    limit: float  # of the gate from above, of up from both sides


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Sparse layers: beside an MLP or in place of it they have many, of which a row takes few.

    These are the experts; a router [experts, hidden] chooses.
    """

    num_experts: int
    top_k: int  # experts of a row
    intermediate_size: int  # of each expert
    renormalize: bool  # the weights of a row's experts add up to 1
    layers: tuple[int, ...]  # that are sparse, in ascending order
    swiglu: ClampedSwiglu | None = None  # None: the gate is SiLU
    has_shared_gate: bool = False  # of what the MLP beside them returns, one for each row


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer, with an lm_head or a head that classifies."""

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
    linears: tuple[Linear, ...]  # of all kinds of layers
    qk_norm: bool
    dtype: str  # as stored: "bfloat16", "float16" or "float32"
    bos_token_id: int | None
    family: str = ""  # a file of worker.models.families
    quantization: Quantization | None = None  # None: linears lie in the checkpoint as they are
    is_multimodal: bool = False  # the language model of a checkpoint that has other towers as well
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    classifier: ClassifierConfig | None = None  # of a head in place of lm_head
    norms: LayerNorms = LayerNorms()
    norm_offset: float = 0.0  # added to the weights of all norms
    has_attention_gate: bool = False  # of each feature that attention returns; Q's linear makes it
    qk_norm_is_wide: bool = False  # over all heads of Q, and of K, together
    activation: Activation = "silu"  # of the MLP's gate
    attention_scale: float | None = None  # of q k; None: head_dim**-0.5
    embedding_multiplier: float = 1.0  # of what comes out of the embedding
    is_multiplier_rounded: bool = False  # to the dtype of the embedding
    residual_multiplier: float = 1.0  # of what a block adds to the residual
    logits_scaling: float = 1.0  # that logits are divided by
    sliding_window: int | None = None  # positions that a row sees in `sliding_layers`
    sliding_layers: tuple[int, ...] = ()  # in ascending order
    sliding_rope: RopeConfig | None = None  # of `sliding_layers`; None: as of all others
    nope_layers: tuple[int, ...] = ()  # that have no rotary embedding, in ascending order
    experts: ExpertsConfig | None = None  # of sparse layers; None: none is
    has_sinks: bool = False  # each query head has a score that joins its softmax
    final_norm: str = "norm"  # what a checkpoint calls it, and the norms of Q and K
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    mixer: MixerConfig | None = None  # what `mixer_layers` have in place of attention
    mixer_block: str = ""  # the module of such a layer that it is
    mixer_layers: tuple[int, ...] = ()  # in ascending order

    def is_sparse(self, layer: int) -> bool:
        """Tell whether a layer has experts."""
        return self.experts is not None and layer in self.experts.layers

    def linears_of(self, layer: int) -> tuple[Linear, ...]:
        """Return the linears of a layer."""
        mlp: Layers = "sparse" if self.is_sparse(layer) else "dense"
        kinds = "all", mlp, "mixer" if layer in self.mixer_layers else "attention"
        return tuple(linear for linear in self.linears if linear.in_layers in kinds)


def check_length(model: ModelConfig, max_model_len: int) -> None:
    """Refuse lengths that the model was not made for."""
    if max_model_len > model.max_position:
        raise ValueError(
            f"max_model_len {max_model_len} is over max_position_embeddings {model.max_position}"
        )
