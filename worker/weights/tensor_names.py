"""What a Hugging Face checkpoint calls the tensors of a model, and the shape of each.

Free of torch: what a checkpoint holds is checked before anything is started.
"""

from collections.abc import Container, Iterator
from dataclasses import replace

from worker.linears import MXFP4_BLOCK, Linear
from worker.model_config import ModelConfig
from worker.quantization.formats import FLOATS, UNUSED
from worker.weights.partition import Partition, partition, whole_shape

EMBEDDING_NAME = "model.embed_tokens.weight"
HEAD_NAME = "lm_head.weight"
SCORE_NAME = "score.weight"  # of a classification head
_PACKED_DTYPES = ("U8",)
_BLOCKS, _SCALES = "_blocks", "_scales"  # behind the name of what is quantized

# What names of tensors begin with in a multimodal model, and what they do here: transformers writes
# the first, and wrote the others before its release 4.52.
_LANGUAGE_MODEL_ROOTS = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_OTHER_TOWERS = (
    *("model.visual.", "visual.", "model.vision_tower.", "vision_tower."),
    *("model.multi_modal_projector.", "multi_modal_projector.", "mtp."),
)

Shape = tuple[int, ...]


def layer_name(index: int) -> str:
    """Return what the names of a layer's tensors begin with."""
    return f"model.layers.{index}"


def final_norm_name(config: ModelConfig) -> str:
    """Return the name of the weight of the final norm."""
    return f"model.{config.final_norm}.weight"


def sinks_name(layer: int) -> str:
    """Return the name of a layer's sinks."""
    return f"{layer_name(layer)}.self_attn.sinks"


def linear_name(layer: int, linear: Linear) -> str:
    """Return the name of a linear module, without `.weight` or `.bias`."""
    return f"{layer_name(layer)}.{linear.path}"


def stack_name(layer: int, linear: Linear) -> str:
    """Return the name of the tensor of all experts that a linear is part of, as if plain."""
    assert linear.stack is not None, f"{linear.name} has tensors of its own"
    return f"{layer_name(layer)}.{linear.block}.{linear.stack.name}"


def stack_tensors(
    name: str, linear: Linear, shape: tuple[int, int], num_experts: int
) -> tuple[tuple[str, Shape], ...]:
    """Return the names and shapes of the tensors of a stack: weights, quantized in two, and biases.

    Args:
        name: of the stack.
        linear: of one expert, of which it is made.
        shape: outputs and inputs of the linear.
        num_experts: that it is made of.
    """
    assert linear.stack is not None, f"{linear.name} has tensors of its own"
    outputs, inputs = linear.stack.num_parts * shape[0], shape[1]
    matrix = (inputs, outputs) if linear.stack.is_turned else (outputs, inputs)
    weights: tuple[tuple[str, Shape], ...] = ((name, (num_experts, *matrix)),)
    if linear.stack.is_mxfp4:
        scales = (num_experts, outputs, inputs // MXFP4_BLOCK)
        blocks = (*scales, MXFP4_BLOCK // 2)  # two in a byte
        weights = ((f"{name}{_BLOCKS}", blocks), (f"{name}{_SCALES}", scales))
    biases = ((f"{name}_bias", (num_experts, outputs)),) if linear.has_bias else ()
    return (*weights, *biases)


def as_stored(config: ModelConfig, names: Container[str]) -> ModelConfig:
    """Return a model whose experts are in stacks, or not, as they are in a checkpoint.

    Args:
        config: of the model, with the stacks that there may be.
        names: of the checkpoint's tensors.
    """
    if config.experts is None:
        return config
    layer = config.experts.layers[0]
    linears = tuple(
        replace(one, stack=None)
        if one.stack is not None and one.stack.is_optional and stack_name(layer, one) not in names
        else one
        for one in config.linears
    )
    return replace(config, linears=linears)


def standard_name(name: str, config: ModelConfig) -> str | None:
    """Return what a tensor of a file is called here, None for one of a tower that is not served."""
    if not config.is_multimodal:
        return name
    return None if name.startswith(_OTHER_TOWERS) else language_model_name(name)


def language_model_name(name: str) -> str:
    """Return what something of a multimodal model's language model is called here."""
    for root, standard in _LANGUAGE_MODEL_ROOTS.items():
        if name.startswith(root):
            return standard + name.removeprefix(root)
    return name


def weight_tensors(
    name: str, shape: tuple[int, int], config: ModelConfig
) -> tuple[tuple[str, Shape], ...]:
    """Return the names and shapes of the tensors that the weight of a linear module lies in."""
    weight_format = None if config.quantization is None else config.quantization.of(name)
    if weight_format is None:
        return ((f"{name}.weight", shape),)
    return tuple((f"{name}.{one.suffix}", one.shape) for one in weight_format.stored(shape))


def stored_dtypes(name: str) -> tuple[str, ...]:
    """Return the types in which a tensor may be stored, as safetensors calls them.

    Not of those that the weight of a quantized linear lies in: `code_dtypes` has these.
    """
    return _PACKED_DTYPES if name.endswith((_BLOCKS, _SCALES)) else FLOATS


def code_dtypes(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return the same by their names of the tensors of all quantized linears."""
    quantization = config.quantization
    if quantization is None or quantization.format is None:
        return {}
    stored = quantization.format.stored((1, 1))
    return {
        f"{name}.{one.suffix}": one.dtypes
        for layer in range(config.num_layers)
        for name in (linear_name(layer, linear) for linear in config.linears_of(layer))
        if quantization.covers(name)
        for one in stored
    }


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield the name and the shape of every tensor that a model consists of."""
    vocabulary = (config.vocab_size, config.hidden_size)
    yield EMBEDDING_NAME, vocabulary
    yield final_norm_name(config), (config.hidden_size,)
    if config.classifier is not None:
        yield SCORE_NAME, (config.classifier.num_labels, config.hidden_size)
    elif not config.tie_word_embeddings:
        yield HEAD_NAME, vocabulary
    whole = partition(config, 1, 0)
    for layer in range(config.num_layers):
        yield from layer_tensors(config, whole, layer)


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Tell whether a tensor may lie in a checkpoint without being used."""
    if name == HEAD_NAME:
        return config.tie_word_embeddings or config.classifier is not None
    if config.quantization is not None and name.rpartition(".")[2] in UNUSED:
        return True
    return name.endswith(".rotary_emb.inv_freq")  # a constant that old checkpoints carry


def mixer_name(config: ModelConfig, layer: int, tensor: str) -> str:
    """Return the name of a tensor of a layer's mixer."""
    return f"{layer_name(layer)}.{config.mixer_block}.{tensor}"


def layer_tensors(config: ModelConfig, whole: Partition, layer: int) -> Iterator[tuple[str, Shape]]:
    """Yield the name and the shape of every tensor of a layer; `whole` is all of the model."""
    for norm in config.norms.names():
        yield f"{layer_name(layer)}.{norm}.weight", (config.hidden_size,)
    for linear in config.linears_of(layer):
        shape, name = whole_shape(whole, linear.name), linear_name(layer, linear)
        if linear.stack is not None:
            if config.experts is not None and linear.expert == linear.stack.part == 0:
                stack = stack_name(layer, linear)
                yield from stack_tensors(stack, linear, shape, config.experts.num_experts)
            continue
        yield from weight_tensors(name, shape, config)
        if linear.has_bias:
            yield f"{name}.bias", shape[:1]
    if config.mixer is not None and layer in config.mixer_layers:
        for tensor, of_mixer in config.mixer.tensors:
            yield mixer_name(config, layer, tensor), of_mixer
        return
    if config.has_sinks:
        yield sinks_name(layer), (config.num_heads,)
    heads = config.num_heads, config.num_kv_heads
    for module, num_heads in zip(config.qk_norm_names, heads, strict=True):
        if config.qk_norm:
            width = num_heads * config.head_dim if config.qk_norm_is_wide else config.head_dim
            yield f"{layer_name(layer)}.self_attn.{module}.weight", (width,)
