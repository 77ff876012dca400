"""What a rank loads before it has pages: its kernels, its slices of a model, slots for adapters.

Owns the order in which these are made, and how the rank's budgets of memory become pages.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kernels.dispatch import kernels_for
from kernels.interface import AnyKernels
from kernels.quantized import Quantizer
from worker.cache.kv_cache import KVCache
from worker.cache.page_budget import PageKinds, cut_budget, page_kinds, page_num_bytes, row_bytes
from worker.distributed.communicator import Communicator
from worker.lora.adapter_bank import AdapterBank, bank_for
from worker.lora.base_weights import BaseWeights
from worker.mixers.config import Shape, state_bytes
from worker.model_config import ModelConfig
from worker.models.decoder import Model
from worker.pools import PageCounts
from worker.protocol import RankConfig, RankInfo
from worker.sampling.row_logits import MAX_VOCABULARY
from worker.weights.loader import load_weights
from worker.weights.model_weights import Weights, batch_variant_linears
from worker.weights.partition import Partition, partition, sums_are_exact

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model as one rank has it; all slots are empty."""

    config: RankConfig
    model_config: ModelConfig
    part: Partition
    device: torch.device
    dtype: torch.dtype  # of activations
    kernels: AnyKernels
    model: Model
    bank: AdapterBank
    kinds: PageKinds
    batch_variant_linears: tuple[str, ...]  # some rows of which have other bits in other batches

    def info(self) -> RankInfo:
        """Return what the scheduler is to know, with how many pages this rank has room for."""
        config, kinds, of_layer = self.config, self.kinds, self._layer_page_bytes
        host_pages = self.pages_in(config.kv_host_memory_bytes)
        kv_bytes = config.kv_memory_bytes
        return RankInfo(
            rank=config.rank,
            pid=os.getpid(),
            node_id="",
            max_pages=None if kv_bytes is None else self.pages_in(kv_bytes),
            max_host_pages=host_pages if kinds.full_layers else replace(host_pages, full=0),
            page_bytes=of_layer * len(kinds.full_layers),
            weight_bytes=self.model.num_bytes,
            device=config.device,
            products=", ".join(filter(None, (self.kernels.products, config.quantization))),
            batch_variant_linears=self.batch_variant_linears,
            window=kinds.window,
            window_page_bytes=of_layer * len(kinds.window_layers),
            state_page_bytes=self._state_page_bytes,
        )

    def pages_in(self, num_bytes: int) -> PageCounts:
        """Return how many pages of each pool fit into so many bytes."""
        return cut_budget(num_bytes, self.kinds, self._layer_page_bytes, self._state_page_bytes)

    @property
    def _layer_page_bytes(self) -> int:
        item_bytes, dtype = self.dtype.itemsize, self.config.kv_cache_dtype
        width = row_bytes(self.model_config.head_dim, item_bytes, dtype)
        return page_num_bytes(1, len(self.part.kv_heads), self.config.page_size, width)

    @property
    def _state_page_bytes(self) -> int:
        if self.model_config.mixer is None:
            return 0
        of_layer = state_bytes(self.model_config.mixer, self.config.tp, self.config.rank)
        return of_layer * len(self.kinds.state_layers)

    @property
    def _state_shapes(self) -> tuple[Shape, ...]:
        return () if self.part.mixer is None else self.part.mixer.state_shapes

    def new_cache(self, pages: PageCounts, host_pages: PageCounts) -> KVCache:
        """Return pages of this rank, on its device and in host memory."""
        return KVCache(
            num_layers=self.model_config.num_layers,
            pages=pages,
            host_pages=host_pages,
            num_kv_heads=len(self.part.kv_heads),
            page_size=self.config.page_size,
            head_dim=self.model_config.head_dim,
            dtype=self.dtype,
            device=self.device,
            kernels=self.kernels,
            window_layers=self.kinds.window_layers,
            state_layers=self.kinds.state_layers,
            state_shapes=self._state_shapes,
            kv_cache_dtype=self.config.kv_cache_dtype,
        )


def load_model(config: RankConfig, model_config: ModelConfig, group: Communicator) -> LoadedModel:
    """Read what a rank has of a model.

    Args:
        config: of the rank.
        model_config: what the model's directory says of it.
        group: all ranks of the model.

    Raises:
        FileNotFoundError: if the model directory lacks a file.
        ValueError: if the model cannot be served, or not with this configuration.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device, dtype = torch.device(config.device), _DTYPES[config.dtype]
    kernels = kernels_for(device, config.deterministic, config.tp, torch.get_num_threads())
    quantizer = _quantizer(config, kernels)
    model_dir = Path(config.model_dir)
    assert model_config.vocab_size <= MAX_VOCABULARY, "token ids are summed as float32"
    is_exact = sums_are_exact(config.quantization, deterministic=config.deterministic)
    part = partition(model_config, config.tp, config.rank, has_exact_sums=is_exact)
    prepare = kernels.prepare_linear, kernels.prepare_experts, quantizer
    weights = load_weights(model_dir, model_config, part, dtype, device, *prepare)
    model = Model(model_config, part, weights, group, kernels, config.max_model_len)
    bank = bank_for(
        kernels,
        part,
        num_layers=model_config.num_layers,
        num_slots=config.num_slots,
        dtype=dtype,
        device=device,
        base=BaseWeights(model_dir, model_config, part, dtype, quantizer),
        lora_dtype=config.lora_dtype,
    )
    return LoadedModel(
        config=config,
        model_config=model_config,
        part=part,
        device=device,
        dtype=dtype,
        kernels=kernels,
        model=model,
        bank=bank,
        kinds=page_kinds(model_config, config.page_size, config.max_model_len),
        batch_variant_linears=_variant_linears(config, device, weights, kernels),
    )


def _quantizer(config: RankConfig, kernels: AnyKernels) -> Quantizer | None:
    """Return how linears are quantized, None if none is to be.

    Raises:
        ValueError: they cannot be computed here.
    """
    method = config.quantization
    if method is None:
        return None
    linears = kernels.quantized
    if linears is None:
        raise ValueError(
            f"quantization: {method} is computed on CPUs by the C library alone, and rank "
            f"{config.rank} on {config.device} has none; leave it out"
        )
    return Quantizer(method, linears)


def _variant_linears(
    config: RankConfig, device: torch.device, weights: Weights, kernels: AnyKernels
) -> tuple[str, ...]:
    """Return the linears whose rows depend on their batch where none is meant to."""
    is_invariant = device.type == "cpu" or config.deterministic
    return batch_variant_linears(weights, kernels) if is_invariant else ()
