"""A Llama-3.1-8B of random numbers, made on the device, and adapters for it likewise.

Owns weights, KV cache and adapters of one rank, and the rows of the steps that are timed. The
adapters come ready made: what loading one costs is no part of a step.

Shapes: L layers, R stacked lora_rank, K inputs, N outputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.gpu.backend import GpuKernels
from kernels.linear import LinearWeight
from tests.gpu.place import Place
from tests.gpu.random_model import linear_weight, llama_config
from tests.llama_linears import FUSED_MODULES
from worker.cache.kv_cache import KVCache
from worker.lora.adapter_bank import AdapterBank, SlotRows
from worker.lora.adapter_weights import AdapterWeights, LoraLayerWeights
from worker.lora.pointer_table import PointerTable
from worker.model_config import ModelConfig
from worker.models.forward_batch import InputBatch
from worker.pools import PageCounts
from worker.spans import total_length
from worker.weights.model_weights import LayerWeights, Weights
from worker.weights.partition import Partition, partition

DTYPE = torch.bfloat16
_TOKEN = 7


class ReadyBank(AdapterBank):
    """A bank whose slots are filled with what is on the device already."""

    def put(self, slot: int, weights: AdapterWeights) -> None:
        assert self.table is not None, "made with one"
        self._slots[slot] = weights
        self.table.put(slot, weights)


class Llama:
    """One rank's memory: weights, pages and slots."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.config = place.pick(
            llama_config(32, 4096, 14_336, (32, 8, 128), 128_256),
            llama_config(2, 64, 96, (4, 2, 32), 97),
        )
        self.part = partition(self.config, 1, 0)
        self.page = place.pick(64, 16)
        self.context = place.pick(2048, 20)
        self.num_rows = place.pick(64, 2)
        self.prompt = place.pick(8192, 20)
        self.pages_each = -(-self.context // self.page)
        self.weights = _weights(place, self.config, self.part)
        self.cache = KVCache(
            num_layers=self.config.num_layers,
            pages=PageCounts(max(self.num_rows * self.pages_each, -(-self.prompt // self.page))),
            num_kv_heads=self.config.num_kv_heads,
            page_size=self.page,
            head_dim=self.config.head_dim,
            dtype=DTYPE,
            device=place.device,
            kernels=GpuKernels(deterministic=False),
        )
        for layer in range(self.config.num_layers):
            for pages in self.cache.layer(layer):
                pages.normal_()
        table = PointerTable(
            self.part,
            num_layers=self.config.num_layers,
            num_slots=self.num_rows,
            device=place.device,
        )
        self.bank = ReadyBank(
            self.part,
            num_layers=self.config.num_layers,
            num_slots=self.num_rows,
            dtype=DTYPE,
            device=place.device,
            table=table,
        )
        self.lora_ranks: list[int] = []

    def load(self, lora_ranks: Sequence[int]) -> None:
        """Fill the first slots with adapters of all linears; the others are empty."""
        if self.lora_ranks == list(lora_ranks):
            return
        for slot in range(self.num_rows):
            self.bank.clear(slot)
        self.place.tidy()
        for slot, lora_rank in enumerate(lora_ranks):
            self.bank.put(slot, self._adapter(lora_rank))
        self.lora_ranks = list(lora_ranks)

    def decodes(self, num_rows: int, num_adapters: int) -> InputBatch:
        """Return a step of sequences at full context, dealt evenly to the first adapters."""
        bounds = [num_rows * i // max(1, num_adapters) for i in range(num_adapters + 1)]
        return InputBatch(
            token_ids=[_TOKEN] * num_rows,
            query_starts=list(range(num_rows + 1)),
            context_lens=[self.context] * num_rows,
            page_tables=[
                list(range(i * self.pages_each, (i + 1) * self.pages_each)) for i in range(num_rows)
            ],
            decodes=[True] * num_rows,
            runs=tuple(
                SlotRows(slot, bounds[slot], bounds[slot + 1]) for slot in range(num_adapters)
            ),
            sample_rows=list(range(num_rows)),
        )

    def prefill(self, num_adapters: int) -> InputBatch:
        """Return a step of one whole prompt."""
        return InputBatch(
            token_ids=[_TOKEN] * self.prompt,
            query_starts=[0, self.prompt],
            context_lens=[self.prompt],
            page_tables=[list(range(-(-self.prompt // self.page)))],
            decodes=[False],
            runs=(SlotRows(0, 0, self.prompt),) if num_adapters else (),
            sample_rows=[self.prompt - 1],
        )

    def decode_bytes(self, num_rows: int) -> int:
        """Return what a decode step has to read, adapters aside."""
        config = self.config
        position = 2 * config.num_layers * config.num_kv_heads * config.head_dim * DTYPE.itemsize
        return (
            self._linear_bytes()
            + self.weights.lm_head.num_bytes
            + (num_rows * self.context * position)
        )

    def adapter_bytes(self, num_adapters: int) -> int:
        """Return what the first adapters hold."""
        features = sum(sum(_shape(self.part, module)) for module in _MODULES)
        total = sum(self.lora_ranks[:num_adapters])
        return total * features * self.config.num_layers * DTYPE.itemsize

    def prefill_operations(self) -> float:
        """Return the operations of the prompt: products and causal attention."""
        config, n = self.config, self.prompt
        products = 2 * n * self._linear_bytes() // DTYPE.itemsize
        return products + 2 * n * n * config.num_heads * config.head_dim * config.num_layers

    def _linear_bytes(self) -> int:
        return sum(
            linear.num_bytes
            for layer in self.weights.layers
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)
            if linear is not None
        )

    def _adapter(self, lora_rank: int) -> AdapterWeights:
        layers = tuple(
            tuple(self._fused(modules, lora_rank) if modules else None for modules in FUSED_MODULES)
            for _ in range(self.config.num_layers)
        )
        return AdapterWeights(f"r{lora_rank}", layers, None, None)

    def _fused(self, modules: Sequence[str], lora_rank: int) -> LoraLayerWeights:
        """Return the LoRA of one fused linear, each block of B on 64 bytes."""
        _, inputs = _shape(self.part, modules[0])
        widths = [_shape(self.part, module)[0] for module in modules]
        blocks, output, size = [], 0, 0
        for index, width in enumerate(widths):
            first = index * lora_rank
            blocks.append((first, first + lora_rank, output, output + width, size))
            output += width
            size += -(-lora_rank * width // 32) * 32
        shape = (len(modules) * lora_rank, inputs)
        return LoraLayerWeights(
            _normal(self.place, shape, inputs**-0.5),
            _normal(self.place, (size,), 0.1),
            torch.tensor(blocks),
            None,
            None,
        )


_MODULES = tuple(module for modules in FUSED_MODULES for module in modules)


def _shape(part: Partition, module: str) -> tuple[int, int]:
    """Return how many outputs and inputs of a module a rank holds."""
    outputs, inputs = part.slices(module)
    return total_length(outputs), len(inputs)


def _weights(place: Place, config: ModelConfig, part: Partition) -> Weights:
    """Return random weights that keep numbers near 1."""

    def linear(*modules: str) -> LinearWeight:
        shapes = [_shape(part, module) for module in modules]
        inputs = shapes[0][1]
        return linear_weight(_normal(place, (sum(n for n, _ in shapes), inputs), inputs**-0.5))

    def norm() -> Tensor:
        return torch.ones(config.hidden_size, dtype=DTYPE, device=place.device)

    layers = tuple(
        LayerWeights(
            input_norm=norm(),
            qkv=linear(*FUSED_MODULES[0]),
            q_norm=None,
            k_norm=None,
            o=linear(*FUSED_MODULES[1]),
            mlp_norm=norm(),
            gate_up=linear(*FUSED_MODULES[2]),
            down=linear(*FUSED_MODULES[3]),
        )
        for _ in range(config.num_layers)
    )
    vocabulary = (config.vocab_size, config.hidden_size)
    lm_head = linear_weight(_normal(place, vocabulary, config.hidden_size**-0.5))
    return Weights(_normal(place, vocabulary, 1.0), layers, norm(), lm_head)


def _normal(place: Place, shape: tuple[int, ...], scale: float) -> Tensor:
    return torch.empty(shape, dtype=DTYPE, device=place.device).normal_(0.0, scale)
