"""How much memory a configuration will take, estimated before anything starts.

Owns the sums: what each rank holds, on its device and beside it, and what the processes around the
ranks hold on a host that has all of them. Mirrors what `worker` allocates; a test holds the two
together. Everything is counted at its fullest; what takes memory only as it is used is marked.
Weight files that are mapped, and that the kernel gives up when memory is short, do not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from deploy.config import ServeConfig
from deploy.machine import num_cores
from worker.cache.page_budget import (
    PageKinds,
    cut_budget,
    page_kinds,
    page_num_bytes,
    row_bytes,
)
from worker.linears import all_products
from worker.mixers.config import Mamba2Config, mixer_bytes, state_bytes
from worker.model_config import ModelConfig
from worker.spans import total_length
from worker.weights.partition import Partition, partition, partitions

Place = Literal["device", "host", "store"]  # "store": shared memory of the Ray object store

ITEM_BYTES = {"bfloat16": 2, "float32": 4}
_MIB = 2**20
_PANEL = 32  # outputs that packed weights are padded to, as kernels.native.packing has it
_FIRST = 64, 16, 16  # rows, samples and lora_rank that worker.runners.native_runner starts with
_GRAPH_ROWS = 256  # of the largest graph of worker.runners.gpu_runner

# What llguidance keeps of a token of the model: 750 bytes at 49,152 of them, rounded up.
_GRAMMAR_TOKEN = 2**10
# What a process takes before it has done anything: VmRSS of those of `topwork serve`, rounded up.
_RANK_PROCESS = 400 * _MIB  # Python, torch, Ray
_CUDA_CONTEXT = 1024 * _MIB  # with cuBLAS's and NCCL's workspaces
_ROUTER = 450 * _MIB
_SCHEDULER = 400 * _MIB
_POOL = 200 * _MIB
CORES_FOR_TWO_ROUTERS = 4  # on fewer the second one would take its time from the ranks
_RAY = 700 * _MIB


@dataclass(frozen=True, slots=True)
class Part:
    """Some memory, what it is for, and where it lies."""

    name: str
    place: Place
    num_bytes: int
    is_taken_at_start: bool = True  # else as it is used


def total(parts: Sequence[Part], *places: Place) -> int:
    """Return the bytes of the parts that lie in one of the places."""
    return sum(part.num_bytes for part in parts if part.place in places)


def _layer_page_bytes(config: ServeConfig, model: ModelConfig, num_kv_heads: int) -> int:
    """Return the bytes of one layer of a KV page on a rank that holds so many KV heads."""
    row = row_bytes(model.head_dim, ITEM_BYTES[config.dtype], config.kv_cache_dtype)
    return page_num_bytes(1, num_kv_heads, config.page_size, row)


def largest_layer_page(config: ServeConfig, model: ModelConfig) -> int:
    """Return those bytes on the rank with the most KV heads; all have as many pages."""
    ranks = partitions(model, config.tp)
    return _layer_page_bytes(config, model, max(len(part.kv_heads) for part in ranks))


def largest_state_page(config: ServeConfig, model: ModelConfig) -> int:
    """Return the bytes of a page of states on the rank with the largest, 0 if there are none."""
    return max(_state_page_bytes(config, model, rank) for rank in range(config.tp))


def _state_page_bytes(config: ServeConfig, model: ModelConfig, rank: int) -> int:
    if model.mixer is None:
        return 0
    return len(model.mixer_layers) * state_bytes(model.mixer, config.tp, rank)


def object_store_bytes(config: ServeConfig) -> int:
    """Return how large the object store of a node must be that the adapter pool may be on.

    The host tier lives in the store; what is on its way to the ranks may be beside it.
    """
    return config.host_adapter_memory * 5 // 4 + 2**28


def max_replicas_of(config: ServeConfig) -> int:
    """Return how many schedulers there may be, each with its own ranks."""
    return config.max_replicas or config.replicas


def num_routers(config: ServeConfig) -> int:
    """Return how many routers a server on this machine alone has: of two, one may die."""
    return config.routers or (2 if num_cores() >= CORES_FOR_TWO_ROUTERS else 1)


def host_parts(config: ServeConfig) -> tuple[Part, ...]:
    """Return what a host holds beside ranks if it holds everything else."""
    return (
        Part("routers", "host", num_routers(config) * _ROUTER),
        Part("schedulers", "host", max_replicas_of(config) * _SCHEDULER),
        Part("adapter pool", "host", _POOL),
        Part("Ray", "host", _RAY),
        Part(
            "object store with the adapters in host memory",
            "store",
            object_store_bytes(config),
            is_taken_at_start=False,
        ),
    )


def rank_parts(
    config: ServeConfig, model: ModelConfig, rank: int, device: str, max_model_len: int
) -> tuple[Part, ...]:
    """Return what one rank holds."""
    part = partition(model, config.tp, rank, has_exact_sums=config.has_exact_sums)
    item_bytes = ITEM_BYTES[config.dtype]
    is_gpu = device == "cuda"
    place: Place = "device" if is_gpu else "host"
    step = _torch_step_bytes if is_gpu else _program_bytes
    kinds = page_kinds(model, config.page_size, max_model_len)
    kv_bytes = partial(_kv_bytes, config, model, part, kinds)
    weights = weight_bytes(
        model,
        part,
        item_bytes,
        is_packed=not is_gpu,
        method=config.quantization,
    )
    parts = [
        Part("weights", place, weights),
        Part("adapters in slots", place, config.adapter_memory, is_taken_at_start=False),
        Part("steps", place, step(config, model, part, item_bytes), is_taken_at_start=False),
        Part("rotary tables", place, _rotary_bytes(model, max_model_len)),
    ]
    kv_memory = config.kv_memory_bytes(device)
    if kv_memory is not None:  # else it is what all others leave
        parts.insert(1, Part("KV cache", place, kv_bytes(kv_memory)))
    if config.kv_host_memory:
        parts.append(Part("KV in host memory", "host", kv_bytes(config.kv_host_memory)))
    if rank == 0:  # which draws
        parts.append(Part("vocabulary of grammars", "host", model.vocab_size * _GRAMMAR_TOKEN))
    if is_gpu:
        parts.append(Part("CUDA context", "device", _CUDA_CONTEXT))
    return (*parts, Part("process", "host", _RANK_PROCESS))


def _rotary_bytes(model: ModelConfig, max_model_len: int) -> int:
    """Return the bytes of cosines and sines; layers that do not rotate have ones and zeros."""
    ropes = [model.rope, *([model.rope] if model.nope_layers else [])]
    ropes += [model.sliding_rope] if model.sliding_rope is not None else []
    return 4 * max_model_len * sum(rope.rotary_dim(model.head_dim) for rope in ropes)


def _kv_bytes(
    config: ServeConfig, model: ModelConfig, part: Partition, kinds: PageKinds, budget: int
) -> int:
    """Return the bytes of a rank's pages, of all kinds that there are."""
    largest = largest_layer_page(config, model), largest_state_page(config, model)
    counts = cut_budget(budget, kinds, *largest)
    num_layers = counts.full * len(kinds.full_layers) + counts.window * len(kinds.window_layers)
    states = counts.state * _state_page_bytes(config, model, part.rank)
    return num_layers * _layer_page_bytes(config, model, len(part.kv_heads)) + states


@dataclass(frozen=True, slots=True)
class _HeldLinears:
    """How a rank holds the weights of its linears."""

    item_bytes: int  # of a weight that is not quantized
    is_packed: bool
    method: str | None  # by which they are quantized

    def outputs(self, rows: int) -> int:
        """Return how many outputs there are with a layout's padding."""
        return _up_to(rows, _PANEL) if self.is_packed else rows

    def head_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of an lm_head."""
        return replace(self, method=self.method and "int8").linear_bytes(rows, columns)

    def linear_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a weight, and of its scales and offsets if it is quantized."""
        outputs = self.outputs(rows)
        if self.method == "int8":
            return outputs * (_up_to(columns, 4) + 4)
        if self.method == "int4":
            return outputs * _up_to(columns, 32) // 32 * (16 + 4)
        per_word = 4 // self.item_bytes if self.is_packed else 1  # words of four bytes
        return outputs * _up_to(columns, per_word) * self.item_bytes


def weight_bytes(
    model: ModelConfig,
    part: Partition,
    item_bytes: int,
    *,
    is_packed: bool,
    method: str | None = None,
) -> int:
    """Return the bytes of one rank's weights if none is coded; coded ones take a quarter less.

    Linears are quantized by a `method` of `--quantization`, if any.
    """
    held = _HeldLinears(item_bytes, is_packed, method)
    bias_bytes = 4 if is_packed else item_bytes
    norm_bytes = 4 if model.norm_offset else item_bytes
    num_sparse = 0 if model.experts is None else len(model.experts.layers)
    num_mixers = len(model.mixer_layers)
    counts = {"all": model.num_layers, "sparse": num_sparse, "mixer": num_mixers}
    counts["dense"] = model.num_layers - num_sparse
    counts["attention"] = model.num_layers - num_mixers
    layers = model.num_layers * len(model.norms.names()) * model.hidden_size * norm_bytes
    layers += counts["attention"] * _qk_norm_features(model, part) * norm_bytes
    layers += counts["attention"] * model.has_sinks * len(part.q_heads) * 4
    if model.mixer is not None and part.mixer is not None:
        layers += num_mixers * mixer_bytes(model.mixer, part.mixer, item_bytes)
    for modules in filter(None, all_products(model.linears)):
        slices = [part.slices(linear.name) for linear in modules]
        rows = sum(total_length(outputs) for outputs, _ in slices)
        has_bias = part.adds_bias(modules[0]) and any(linear.has_bias for linear in modules)
        own = held if not modules[0].is_router else replace(held, method=None)
        linear_bytes = own.linear_bytes(rows, len(slices[0][1]))
        # Experts lie in one row of panels.
        biases = rows if modules[0].expert is None else own.outputs(rows)
        linear_bytes += biases * bias_bytes * has_bias
        layers += counts[modules[0].in_layers] * linear_bytes
    # Rows to look up and panels to multiply by are two copies; as plain rows one serves both.
    has_head = is_packed or not model.tie_word_embeddings
    score_bytes = 0
    if model.classifier is not None:  # whole on every rank, in float32, in place of the head
        has_head, score_bytes = False, model.classifier.num_labels * model.hidden_size * 4
    head = held.head_bytes(len(part.vocab), model.hidden_size) * has_head
    table = len(part.vocab) * model.hidden_size * item_bytes
    last_norm = model.hidden_size * norm_bytes
    return layers + head + table + last_norm + score_bytes


def _qk_norm_features(model: ModelConfig, part: Partition) -> int:
    """Return how wide the norms of Q and K are together."""
    heads = len(part.q_heads) + len(part.kv_heads) if model.qk_norm_is_wide else 2
    return model.qk_norm * heads * model.head_dim


def _up_to(number: int, step: int) -> int:
    """Return the next multiple."""
    return -(-number // step) * step


def _program_bytes(
    config: ServeConfig, model: ModelConfig, part: Partition, item_bytes: int
) -> int:
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
    return programs + _beside_the_program(config, model, "cpu", item_bytes)


def _row_bytes(model: ModelConfig, part: Partition, item_bytes: int) -> int:
    """Return what a row takes in the layers: what goes in, each op's output and the residual."""
    heads = len(part.q_heads) * model.head_dim
    qkv = heads * (1 + model.has_attention_gate) + 2 * len(part.kv_heads) * model.head_dim
    has_normed_blocks = model.norms.after_attention is not None
    in_float32 = (3 + has_normed_blocks) * model.hidden_size + qkv + 2 * len(part.mlp)
    in_float32 += 2 * model.qk_norm_is_wide  # the squares of Q and K
    dense = 4 * in_float32 + item_bytes * (model.hidden_size + 2 * heads + len(part.mlp))
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
            pair += _up_to(item_bytes * part.all_inputs(linear.name), 4)
    row = 4 * (model.hidden_size + part.tp)
    row += sum(_up_to(item_bytes * width, 4) for width in dense)
    if model.qk_norm and model.qk_norm_is_wide:
        row += 4 * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    if isinstance(model.mixer, Mamba2Config):
        row += 2 * 4 * len(model.mixer.part(1, 0).out_columns)
    return row + pair * (0 if model.experts is None else model.experts.top_k)


def _beside_the_program(
    config: ServeConfig, model: ModelConfig, device: str, item_bytes: int
) -> int:
    """Return what a step allocates for itself: embeddings, the ranks' sums, logits to draw from."""
    summed = config.token_budget(device) * model.hidden_size
    sums = summed * (item_bytes + 4 * (config.tp if config.tp > 1 else 0))
    return sums + 3 * 4 * config.num_sequences(device) * model.vocab_size


def _torch_step_bytes(
    config: ServeConfig, model: ModelConfig, part: Partition, item_bytes: int
) -> int:
    """Return what steps take on a GPU: the largest step by itself, and what graphs keep."""
    row = _row_bytes(model, part, item_bytes)
    graphs = _GRAPH_ROWS * (row + 4 * len(part.vocab) + 4 * model.vocab_size)
    steps = config.token_budget("cuda") * row
    return steps + graphs + _beside_the_program(config, model, "cuda", item_bytes)


def _grown(capacity: int, wanted: int) -> int:
    while capacity < wanted:
        capacity *= 2
    return capacity
