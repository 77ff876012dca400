"""LFM2, dense (transformers.models.lfm2): most layers have a gated short convolution.

The others attend, with norms of Q and K.
"""

from dataclasses import replace

from worker.linears import Linear, mixer_linears
from worker.mixers.config import ShortConvConfig
from worker.model_config import LayerNorms, ModelConfig
from worker.models.config_file import (
    ConfigFile,
    dense_config,
    mixer_layers,
    multiplier,
    positive,
    require,
)
from worker.models.family import Family

_BLOCK = "conv"
_LARGEST_FACTOR = 1e6


class _File(ConfigFile):
    """`config.json` as written."""

    num_key_value_heads: int | None = 8
    rope_theta: float | None = 1_000_000.0
    tie_word_embeddings: bool = True
    tie_embedding: bool | None = None  # as spelled before transformers 5
    norm_eps: float = 1e-5
    conv_bias: bool = False
    conv_L_cache: int = 3
    block_ff_dim: int | None = None  # likewise, for intermediate_size
    block_multiple_of: int = 256
    block_ffn_dim_multiplier: float | None = 1.0
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: list[int] | None = None
    conv_use_xavier_init: bool | None = None  # these say how it was trained
    eos_token_id: int | list[int] | None = 2
    bos_token_id: int | None = 1


def _read(file: _File) -> ModelConfig:
    num_taps = positive("conv_L_cache", file.conv_L_cache)
    file.rms_norm_eps, file.intermediate_size = file.norm_eps, _mlp_width(file)
    if file.tie_embedding is not None:
        file.tie_word_embeddings = file.tie_embedding
    config = replace(
        dense_config(file, qk_norm=True),
        linears=_linears(conv_bias=file.conv_bias),
        norms=LayerNorms(before_attention="operator_norm", before_mlp="ffn_norm"),
        final_norm="embedding_norm",
        qk_norm_names=("q_layernorm", "k_layernorm"),
    )
    conv_layers = _conv_layers(file)  # of so many layers as are let in by now
    if not conv_layers:
        return replace(config, linears=tuple(o for o in config.linears if o.in_layers != "mixer"))
    mixer = ShortConvConfig(file.hidden_size, num_taps, file.conv_bias)
    return replace(config, mixer=mixer, mixer_block=_BLOCK, mixer_layers=conv_layers)


def _linears(*, conv_bias: bool) -> tuple[Linear, ...]:
    """Return the list of both kinds of layers, whose last projections are called alike."""
    attention, mlp = "self_attn", "feed_forward"
    *mixer_in, mixer_out = mixer_linears(_BLOCK, ("in_proj",), "out_proj", has_bias=conv_bias)
    return (
        Linear("q_proj", attention, "qkv", "column", ("q_heads",), in_layers="attention"),
        Linear("k_proj", attention, "qkv", "column", ("kv_heads",), in_layers="attention"),
        Linear("v_proj", attention, "qkv", "column", ("kv_heads",), in_layers="attention"),
        Linear(f"{attention}.out_proj", "", "o", "row", ("q_heads",), in_layers="attention"),
        *mixer_in,
        replace(mixer_out, name=mixer_out.path, block=""),
        Linear("w1", mlp, "gate_up", "column", ("mlp",)),
        Linear("w3", mlp, "gate_up", "column", ("mlp",)),
        Linear("w2", mlp, "down", "row", ("mlp",)),
    )


def _conv_layers(file: _File) -> tuple[int, ...]:
    """Return the layers that have a convolution."""
    if file.layer_types is None:
        indices, num_layers = file.full_attn_idxs, file.num_hidden_layers
        attending = range(num_layers) if indices is None else frozenset(indices)
        file.layer_types = [
            "full_attention" if at in attending else "conv" for at in range(num_layers)
        ]
    return mixer_layers(file, mixing=("conv",), attending=("full_attention",))


def _mlp_width(file: _File) -> int:
    """Return the features of an MLP, which the file may have before they are cut and rounded."""
    width = file.block_ff_dim or file.intermediate_size
    if not file.block_auto_adjust_ff_dim:
        return width
    width = int(2 * positive("intermediate_size", width) / 3)
    if file.block_ffn_dim_multiplier is None:
        return width
    multiple = positive("block_multiple_of", file.block_multiple_of)
    factor = multiplier("block_ffn_dim_multiplier", file.block_ffn_dim_multiplier)
    require(factor <= _LARGEST_FACTOR, f"block_ffn_dim_multiplier {factor} is too large")
    width = int(factor * width)
    return multiple * -(-width // multiple)


FAMILY = Family(name="lfm2", causal_lm="Lfm2ForCausalLM", file=_File, read=_read)
