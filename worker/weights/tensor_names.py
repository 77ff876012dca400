"""What a Hugging Face checkpoint calls the tensors of a model, and the shape of each.

Free of torch: what a checkpoint holds is checked before anything is started.
"""

from collections.abc import Iterator

from worker.model_config import ModelConfig
from worker.weights.partition import LINEAR_MODULES, module_shape

EMBEDDING_NAME = "model.embed_tokens.weight"
HEAD_NAME = "lm_head.weight"
FINAL_NORM_NAME = "model.norm.weight"
SCORE_NAME = "score.weight"  # of a classification head

Shape = tuple[int, ...]


def layer_name(index: int) -> str:
    """Return what the names of a layer's tensors begin with."""
    return f"model.layers.{index}"


def linear_name(layer: int, module: str) -> str:
    """Return the name of a linear module, without `.weight` or `.bias`."""
    block = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"{layer_name(layer)}.{block}.{module}"


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield the name and the shape of every tensor that a model consists of."""
    vocabulary = (config.vocab_size, config.hidden_size)
    yield EMBEDDING_NAME, vocabulary
    yield FINAL_NORM_NAME, (config.hidden_size,)
    if config.classifier is not None:
        yield SCORE_NAME, (config.classifier.num_labels, config.hidden_size)
    elif not config.tie_word_embeddings:
        yield HEAD_NAME, vocabulary
    for layer in range(config.num_layers):
        yield from _layer_tensors(config, layer)


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Tell whether a tensor may lie in a checkpoint without being used."""
    if name == HEAD_NAME:
        return config.tie_word_embeddings or config.classifier is not None
    return name.endswith(".rotary_emb.inv_freq")  # a constant that old checkpoints carry


def _layer_tensors(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{layer_name(layer)}.{norm}.weight", (config.hidden_size,)
    for module in LINEAR_MODULES:
        shape, name = module_shape(config, module), linear_name(layer, module)
        yield f"{name}.weight", shape
        if _has_bias(config, module):
            yield f"{name}.bias", shape[:1]
    for norm in ("q_norm", "k_norm") if config.qk_norm else ():
        yield f"{layer_name(layer)}.self_attn.{norm}.weight", (config.head_dim,)


def _has_bias(config: ModelConfig, module: str) -> bool:
    if module == "o_proj":
        return config.o_bias
    return config.qkv_bias if module in ("q_proj", "k_proj", "v_proj") else config.mlp_bias
