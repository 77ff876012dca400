"""How much memory a configuration will take, estimated before anything starts.

Owns the sums: what each rank holds, on its device and beside it, and what the processes around the
ranks hold on a host that has all of them. Mirrors what `worker` allocates; tests hold the two
together. Everything is counted at its fullest; what takes memory only as it is used is marked.
Weight files that are mapped, and that the kernel gives up when memory is short, do not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from deploy.config import ServeConfig
from deploy.machine import num_cores
from deploy.memory.cpu_steps import program_bytes
from deploy.memory.gpu_steps import gpu_step_bytes
from deploy.memory.weights import ITEM_BYTES, weight_bytes
from worker.cache.page_budget import (
    PageKinds,
    cut_budget,
    page_kinds,
    page_num_bytes,
    row_bytes,
)
from worker.mixers.config import state_bytes
from worker.model_config import ModelConfig
from worker.weights.partition import Partition, partition, partitions

Place = Literal["device", "host", "store"]  # "store": shared memory of the Ray object store

_MIB = 2**20
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
    kinds = page_kinds(model, config.page_size, max_model_len)
    kv_bytes = partial(_kv_bytes, config, model, part, kinds)
    weights = weight_bytes(
        model,
        part,
        item_bytes,
        is_packed=not is_gpu,
        method=config.quantization,
    )
    steps = (
        gpu_step_bytes(config, model, part, item_bytes, max_model_len)
        if is_gpu
        else program_bytes(config, model, part, item_bytes)
    )
    parts = [
        Part("weights", place, weights),
        Part("adapters in slots", place, config.adapter_memory, is_taken_at_start=False),
        Part("steps", place, steps, is_taken_at_start=False),
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
