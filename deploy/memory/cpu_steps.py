"""What steps write to on a CPU: the buffers of two recorded programs, and what is drawn from."""

from deploy.config import ServeConfig
from deploy.memory.weights import PANEL, up_to
from worker.linears import all_products
from worker.mixers.config import Mamba2Config
from worker.model_config import ModelConfig
from worker.spans import total_length
from worker.weights.partition import Partition

_GROUP = 32  # inputs in 4 bits that share a scale, kernels.quantized.GROUP
_LINE = 64  # bytes; where a row in int8 begins
_SCALED_BYTES = 8  # beside a row's codes, or those of a group
_PART = 64  # inputs in int8 that are laid out together
_INPUT_BYTES = 2  # of one of them, on a CPU that has no dot products of bytes
_FIRST = 64, 16, 16  # rows, samples and lora_rank that worker.runners.native_runner starts with


def program_bytes(config: ServeConfig, model: ModelConfig, part: Partition, item_bytes: int) -> int:
    """Return what steps write to on a CPU: two programs, of which one has adapters, and logits."""
    stacked = max(map(len, all_products(model.linears)))  # LoRAs of a product
    rows, samples, rank = (
        _grown(first, wanted)
        for first, wanted in zip(
            _FIRST,
            (
                config.token_budget("cpu"),
                config.num_sequences("cpu"),
                stacked * config.max_lora_rank,
            ),
            strict=True,
        )
    )
    row = _row_bytes(model, part, item_bytes)
    sample = (3 * 4 + item_bytes) * model.hidden_size + 4 * len(part.vocab)
    programs = 2 * (rows * row + samples * sample) + rows * rank * 4
    if len(part.mlp) % PANEL == 0:  # gates and ups stay in a core's cache: all that int8 adds to
        programs -= rows * _gate_up_bytes(part) * (2 if config.lora_dtype == "int8" else 1)
    programs += rows * _coded_bytes(config, model, part, rank)
    return programs + _beside_the_program(config, model, item_bytes)


def _coded_bytes(config: ServeConfig, model: ModelConfig, part: Partition, rank: int) -> int:
    """Return what a row takes in int8: for linears in both programs, for LoRA in one."""
    top_k = 0 if model.experts is None else model.experts.top_k
    inputs = {
        (len(part.slices(one.name)[1]), 1 if one.expert is None else top_k) for one in model.linears
    }
    is_quantized = config.quantization is not None or model.quantization is not None
    is_int4 = is_quantized and config.quantization != "int8"
    taken = 0
    if is_quantized:
        taken += 2 * sum(count * coded_row_bytes(width, is_int4) for width, count in inputs)
    if config.lora_dtype == "int8":
        taken += sum(count * coded_row_bytes(width, False) for width, count in inputs)
        modules = {len(modules) for modules in all_products(model.linears)}
        taken += sum(modules) * (_SCALED_BYTES + up_to(rank * _INPUT_BYTES, _LINE))
    return taken


def coded_row_bytes(width: int, is_int4: bool) -> int:
    """Return what csrc/linear/quantized_rows.h lays out for a row of so many inputs, at most."""
    if is_int4:
        return up_to(up_to(width, _LINE) + -(-width // _GROUP) * _SCALED_BYTES, _LINE)
    num_parts = -(-width // _PART)
    return up_to(num_parts * (_PART * _INPUT_BYTES + 1) + _SCALED_BYTES, _LINE)


def _gate_up_bytes(part: Partition) -> int:
    """Return what the gates and ups of a row take as they come out of their linear."""
    return 4 * 2 * len(part.mlp)


def _row_bytes(model: ModelConfig, part: Partition, item_bytes: int) -> int:
    """Return what a row takes in the layers: what goes in, each op's output and the residual."""
    heads = len(part.q_heads) * model.head_dim
    qkv = heads * (1 + model.has_attention_gate) + 2 * len(part.kv_heads) * model.head_dim
    has_normed_blocks = model.norms.after_attention is not None
    in_float32 = (3 + has_normed_blocks) * model.hidden_size + qkv
    in_float32 += 2 * model.qk_norm_is_wide  # the squares of Q and K
    dense = 4 * in_float32 + item_bytes * (model.hidden_size + 2 * heads + len(part.mlp))
    dense += _gate_up_bytes(part)
    if part.mixer is not None:  # what it projects, convolves and remembers, and what comes of that
        outputs = len(part.mixer.out_columns)
        widths = total_length(part.mixer.in_rows), total_length(part.mixer.channels)
        dense += 4 * (sum(widths) + outputs) + item_bytes * outputs
    experts = model.experts
    if part.has_exact_sums:
        dense += _exact_sums_bytes(model, part, item_bytes)
    if experts is None:
        return dense
    # Of each pair: its number, weight, place and row; the products, and what goes into them.
    pair = 3 * 8 + 4 + 4 * (2 * len(part.expert_mlp) + model.hidden_size)
    pair += item_bytes * (model.hidden_size + len(part.expert_mlp))
    logits = experts.num_experts + experts.has_shared_gate
    return dense + experts.top_k * pair + 4 * (logits + model.hidden_size)


def _exact_sums_bytes(model: ModelConfig, part: Partition, item_bytes: int) -> int:
    """Return what a row takes where ranks add up integers, and gather what else they would sum."""
    dense, pair = set(), 0
    for linear in model.linears:
        if linear.axis == "row" and linear.expert is None:
            dense.add(part.all_inputs(linear.name))
        elif linear.axis == "row":
            pair = 4 * (model.hidden_size + part.tp)
            pair += up_to(item_bytes * part.all_inputs(linear.name), 4)
    row = 4 * (model.hidden_size + part.tp)
    row += sum(up_to(item_bytes * width, 4) for width in dense)
    if model.qk_norm and model.qk_norm_is_wide:
        row += 4 * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    if isinstance(model.mixer, Mamba2Config):
        row += 2 * 4 * len(model.mixer.part(1, 0).out_columns)
    return row + pair * (0 if model.experts is None else model.experts.top_k)


def _beside_the_program(config: ServeConfig, model: ModelConfig, item_bytes: int) -> int:
    """Return what a step allocates for itself: embeddings, the ranks' sums, logits to draw from."""
    summed = config.token_budget("cpu") * model.hidden_size
    sums = summed * (item_bytes + 4 * (config.tp if config.tp > 1 else 0))
    return sums + 3 * 4 * config.num_sequences("cpu") * model.vocab_size


def _grown(capacity: int, wanted: int) -> int:
    while capacity < wanted:
        capacity *= 2
    return capacity
