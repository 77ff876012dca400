"""Where on the device the LoRAs of each slot lie, for kernels that find them by address.

So adapters stay as they are, each at its true lora_rank. Owns the tables, one for each fused linear
of each layer, in the form that kernels.gpu.lora.lora reads. Knows nothing of batches.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.lora.adapter_weights import AdapterForm, LoraPair
from worker.lora.shard import FUSED_MODULES
from worker.weights.partition import Partition

_HEAD = 4  # address of A, lora_rank, addresses of gain and shift
_PER_MODULE = 3  # address of B, first lora_rank, lora_rank
ADDRESS_ALIGNMENT = 16  # bytes


class AdapterTable:
    """Tables of all slots, all empty at first."""

    def __init__(
        self, part: Partition, *, num_layers: int, num_slots: int, device: torch.device
    ) -> None:
        self.widths = tuple(
            tuple(len(part.slices(module)[0]) for module in modules) for modules in FUSED_MODULES
        )
        self._max_ranks = [0] * num_slots
        self._tables = [
            torch.zeros(
                (num_layers, num_slots, _HEAD + _PER_MODULE * len(widths)),
                dtype=torch.int64,
                device=device,
            )
            for widths in self.widths
        ]

    def table(self, layer: int, linear: int) -> Tensor:
        """Return the table [slots, fields] of one fused linear; its place never changes."""
        return self._tables[linear][layer]

    def max_rank(self, slots: Sequence[int]) -> int:
        """Return the largest stacked lora_rank that any linear of these slots has."""
        return max((self._max_ranks[slot] for slot in slots), default=0)

    def put(self, slot: int, form: AdapterForm) -> None:
        """Point a slot at an adapter, whose tensors must stay as long as the slot holds it."""
        for linear, (table, widths) in enumerate(zip(self._tables, self.widths, strict=True)):
            lines = [_line(layer[linear], widths, table.shape[-1]) for layer in form.pairs]
            table[:, slot] = torch.tensor(lines, dtype=torch.int64)
        ranks = (len(pair.a) for layer in form.pairs for pair in layer if pair is not None)
        self._max_ranks[slot] = max(ranks, default=0)

    def clear(self, slot: int) -> None:
        """Point a slot at nothing."""
        for table in self._tables:
            table[:, slot] = 0
        self._max_ranks[slot] = 0


def _line(pair: LoraPair | None, widths: tuple[int, ...], num_fields: int) -> list[int]:
    """Return one slot's line in the table of one fused linear."""
    line = [0] * num_fields
    if pair is None:
        return line
    line[:_HEAD] = (
        _address(pair.a),
        len(pair.a),
        0 if pair.gain is None else _address(pair.gain),
        0 if pair.shift is None else _address(pair.shift),
    )
    firsts = [sum(widths[:index]) for index in range(len(widths))]
    for first_rank, end_rank, output, _, element in pair.blocks.tolist():
        at = _HEAD + _PER_MODULE * firsts.index(output)
        address = _address(pair.b) + element * pair.b.itemsize
        assert address % ADDRESS_ALIGNMENT == 0, "join_blocks aligns each block"
        line[at : at + _PER_MODULE] = address, first_rank, end_rank - first_rank
    return line


def _address(tensor: Tensor) -> int:
    address = tensor.data_ptr()
    assert address % ADDRESS_ALIGNMENT == 0, f"a tensor of an adapter starts at {address}"
    return address
