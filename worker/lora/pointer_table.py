"""The device addresses of the LoRAs of each slot, for kernels that read LoRAs through pointers.

So adapters are neither copied nor padded: each stays at its true lora_rank. One table for each
fused linear of each layer, with the fields that kernels.gpu.lora.apply reads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.linears import FUSED_LINEARS, Linear, by_expert, by_fused
from worker.lora.adapter_weights import AdapterWeights, LoraLayerWeights
from worker.lora.shard import num_outputs
from worker.weights.partition import Partition

_HEAD = 4  # address of A, lora_rank, addresses of gain and shift
_PER_MODULE = 3  # address of B, first lora_rank, lora_rank
ADDRESS_ALIGNMENT = 16  # bytes


class PointerTable:
    """Tables of all slots, all empty at first."""

    def __init__(
        self, part: Partition, *, num_layers: int, num_slots: int, device: torch.device
    ) -> None:
        experts = by_expert(part.linears)
        self._num_experts = len(experts[0])

        def widths(modules: Sequence[Linear]) -> tuple[int, ...]:
            return tuple(num_outputs(part, linear.name) for linear in modules)

        def table(modules: Sequence[Linear], *shape: int) -> Tensor:
            fields = _HEAD + _PER_MODULE * len(modules)
            shape = num_layers, num_slots, *shape, fields
            return torch.zeros(shape, dtype=torch.int64, device=device)

        fused = by_fused(part.linears)
        self.widths = tuple(map(widths, fused))
        self._tables = [table(modules) for modules in fused]
        self.expert_widths = tuple(widths(of_expert[0]) for of_expert in experts if of_expert)
        self._expert_tables = [
            table(of_expert[0], len(of_expert)) for of_expert in experts if of_expert
        ]
        self._max_lora_ranks = [0] * num_slots

    def table(self, layer: int, linear: int) -> Tensor:
        """Return the table [slots, fields] of one fused linear; its address never changes."""
        return self._tables[linear][layer]

    def expert_table(self, layer: int, linear: int) -> Tensor:
        """Return the table [slots, experts, fields] of one of the experts' linears, likewise."""
        return self._expert_tables[linear][layer]

    def max_lora_rank(self, slots: Sequence[int]) -> int:
        """Return the largest stacked lora_rank that any linear of these slots has."""
        return max((self._max_lora_ranks[slot] for slot in slots), default=0)

    def put(self, slot: int, weights: AdapterWeights) -> None:
        """Point a slot at an adapter, whose tensors must stay as long as the slot holds it."""
        for linear, (table, widths) in enumerate(zip(self._tables, self.widths, strict=True)):
            rows = [_fields(layer[linear], widths, table.shape[-1]) for layer in weights.layers]
            table[:, slot] = torch.tensor(rows, dtype=torch.int64)
        first = len(FUSED_LINEARS)
        for table, widths in zip(self._expert_tables, self.expert_widths, strict=True):
            own, fields = slice(first, first + self._num_experts), table.shape[-1]
            lines = [[_fields(e, widths, fields) for e in layer[own]] for layer in weights.layers]
            table[:, slot] = torch.tensor(lines, dtype=torch.int64)
            first += self._num_experts
        ranks = (len(lora.a) for layer in weights.layers for lora in layer if lora is not None)
        self._max_lora_ranks[slot] = max(ranks, default=0)

    def clear(self, slot: int) -> None:
        """Point a slot at nothing."""
        for table in (*self._tables, *self._expert_tables):
            table[:, slot] = 0
        self._max_lora_ranks[slot] = 0


def _fields(lora: LoraLayerWeights | None, widths: tuple[int, ...], num_fields: int) -> list[int]:
    """Return one slot's fields in the table of one fused linear."""
    fields = [0] * num_fields
    if lora is None:
        return fields
    fields[:_HEAD] = (
        _address(lora.a),
        len(lora.a),
        0 if lora.gain is None else _address(lora.gain),
        0 if lora.shift is None else _address(lora.shift),
    )
    firsts = [sum(widths[:index]) for index in range(len(widths))]
    for first_rank, end_rank, output, _, element in lora.blocks.tolist():
        at = _HEAD + _PER_MODULE * firsts.index(output)
        address = _address(lora.b) + element * lora.b.itemsize
        assert address % ADDRESS_ALIGNMENT == 0, "join_blocks aligns each block"
        fields[at : at + _PER_MODULE] = address, first_rank, end_rank - first_rank
    return fields


def _address(tensor: Tensor) -> int:
    address = tensor.data_ptr()
    assert address % ADDRESS_ALIGNMENT == 0, f"a tensor of an adapter starts at {address}"
    return address
