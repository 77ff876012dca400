"""The device addresses of the LoRAs of each slot, for kernels that read LoRAs through pointers.

So adapters are neither copied nor padded: each stays at its true lora_rank. One table for each
fused linear of each layer, with the fields that kernels.gpu.lora.apply reads.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from worker.linears import FUSED_LINEARS, Linear, by_expert, by_fused
from worker.lora.adapter_weights import AdapterWeights, LoraLayerWeights
from worker.lora.shard import num_outputs
from worker.weights.partition import Partition

_HEAD = 5  # address of A, lora_rank, addresses of gain, shift and scales
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

        def shape(modules: Sequence[Linear], *experts: int) -> tuple[int, ...]:
            return num_layers, num_slots, *experts, _HEAD + _PER_MODULE * len(modules)

        fused, sparse = by_fused(part.linears), [one for one in experts if one]
        self.widths = tuple(map(widths, fused))
        self.expert_widths = tuple(widths(of_expert[0]) for of_expert in sparse)
        shapes = [
            *map(shape, fused),
            *(shape(of_expert[0], len(of_expert)) for of_expert in sparse),
        ]
        sizes = [prod(one) for one in shapes]
        self._numbers = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        pieces = _pieces(self._numbers, shapes)
        self._tables, self._expert_tables = pieces[: len(fused)], pieces[len(fused) :]
        # Where the numbers of slot 0 are, and how far those of the next slot are from each.
        places = _pieces(torch.arange(sum(sizes)), shapes)
        firsts = [piece[:, :1].flatten() for piece in places]
        steps = [torch.full_like(p, prod(one[2:])) for p, one in zip(firsts, shapes, strict=True)]
        self._first, self._step = torch.cat(firsts).to(device), torch.cat(steps).to(device)
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
        numbers: list[int] = []
        for linear, (table, widths) in enumerate(zip(self._tables, self.widths, strict=True)):
            for layer in weights.layers:
                numbers += _fields(layer[linear], widths, table.shape[-1])
        first = len(FUSED_LINEARS)
        for table, widths in zip(self._expert_tables, self.expert_widths, strict=True):
            for layer in weights.layers:
                for lora in layer[first : first + self._num_experts]:
                    numbers += _fields(lora, widths, table.shape[-1])
            first += self._num_experts
        # One copy for all tables: a device takes longer to be sent to than to be sent much.
        sent = torch.tensor(numbers, dtype=torch.int64).to(self._numbers.device)
        self._numbers.index_copy_(0, self._first + slot * self._step, sent)
        ranks = (len(lora.a) for layer in weights.layers for lora in layer if lora is not None)
        self._max_lora_ranks[slot] = max(ranks, default=0)

    def clear(self, slot: int) -> None:
        """Point a slot at nothing."""
        self._numbers.index_fill_(0, self._first + slot * self._step, 0)
        self._max_lora_ranks[slot] = 0


def _pieces(numbers: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return views of such shapes, one behind the other."""
    ends = list(accumulate(map(prod, shapes)))
    starts = [0, *ends[:-1]]
    return [
        numbers[start:end].view(shape)
        for start, end, shape in zip(starts, ends, shapes, strict=True)
    ]


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
        0 if lora.scales is None else lora.scales.data_ptr(),
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
