"""The LoRA weights of the adapters that this rank holds, one adapter in each slot.

Owns their form: the LoRAs of modules that share a fused linear become one pair, A stacked and B in
blocks, at their true lora_rank, with the scaling inside B. Knows nothing of which slot is in use:
the caller must not touch a slot that a running plan names.

Shapes: R lora_rank of a fused linear's modules together, K its inputs and N its outputs on this
rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.lora import LoraSegment
from worker.adapter_shard import AdapterShard, LoraEntry
from worker.partition import Partition

QKV, OUT, GATE_UP, DOWN = range(4)  # the fused linears of a layer
_MODULES = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


LayerSegments = Sequence[Sequence[LoraSegment]]  # of one layer, by fused linear


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Rows [start, stop) of a batch use the adapter in `slot`."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _LoraPair:
    """One adapter's LoRA of one fused linear."""

    a: Tensor  # [R, K]
    b: Tensor  # [N, R], block by block, times the scaling; its transpose is contiguous
    blocks: Tensor  # [modules, 4] int64 on the host, as LoraSegment wants them


@dataclass(frozen=True, slots=True)
class _Adapter:
    """One adapter as the layers use it; None where it leaves a linear alone."""

    digest: str
    pairs: tuple[tuple[_LoraPair | None, ...], ...]  # by layer and fused linear


class AdapterBank:
    """Slots [0, num_slots) of one rank, all empty at first."""

    def __init__(
        self,
        part: Partition,
        *,
        num_layers: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._part = part
        self._num_layers = num_layers
        self._dtype = dtype
        self._device = device
        self._slots: list[_Adapter | None] = [None] * num_slots

    def load(self, slot: int, shard: AdapterShard) -> None:
        """Put an adapter into a slot, in place of all that it held.

        May run while a step does: the slot changes hands in one assignment, after all the work.
        """
        part = self._part
        assert 0 <= slot < len(self._slots), f"slot {slot} of {len(self._slots)}"
        assert (shard.rank, shard.tp) == (part.rank, part.tp), (
            f"shard {shard.rank} of {shard.tp} came to rank {part.rank} of {part.tp}"
        )
        by_place = {(entry.layer, entry.module): entry for entry in shard.entries}
        pairs = tuple(
            tuple(
                self._pair(shard, modules, [by_place.get((layer, module)) for module in modules])
                for modules in _MODULES
            )
            for layer in range(self._num_layers)
        )
        self._slots[slot] = _Adapter(shard.digest, pairs)

    def clear(self, slot: int) -> None:
        """Empty a slot and free its memory."""
        self._slots[slot] = None

    def digest(self, slot: int) -> str | None:
        """Return the digest of the adapter in a slot, None if it is empty."""
        adapter = self._slots[slot]
        return None if adapter is None else adapter.digest

    def segments(self, runs: Sequence[SlotRows]) -> tuple[LayerSegments, ...]:
        """Return what `lora_apply` needs for a batch, by layer and fused linear.

        Empty if the batch has no adapters at all.
        """
        if not runs:
            return ()
        adapters = [self._slots[run.slot] for run in runs]
        return tuple(
            tuple(
                tuple(
                    LoraSegment(run.start, run.stop, pair.a, pair.b, pair.blocks)
                    for run, adapter in zip(runs, adapters, strict=True)
                    if adapter is not None and (pair := adapter.pairs[layer][linear]) is not None
                )
                for linear in range(len(_MODULES))
            )
            for layer in range(self._num_layers)
        )

    def _pair(
        self, shard: AdapterShard, modules: tuple[str, ...], entries: list[LoraEntry | None]
    ) -> _LoraPair | None:
        """Build the pair of one fused linear from those of its modules that have a LoRA."""
        total_rank = sum(entry.lora_rank for entry in entries if entry is not None)
        if total_rank == 0:
            return None
        sizes = [tuple(map(len, self._part.slices(module))) for module in modules]
        num_outputs, num_inputs = sum(outputs for outputs, _ in sizes), sizes[0][1]
        a = torch.empty(total_rank, num_inputs, dtype=self._dtype)
        b = torch.zeros(total_rank, num_outputs, dtype=self._dtype).T
        blocks = []
        row = first = 0
        for entry, (outputs, inputs) in zip(entries, sizes, strict=True):
            if entry is not None:
                last = first + entry.lora_rank
                assert entry.a_shape == (entry.lora_rank, inputs), f"A of {entry}"
                assert entry.b_shape == (outputs, entry.lora_rank), f"B of {entry}"
                a[first:last] = _tensor(shard, entry.a_offset, entry.a_shape)
                scaled = _tensor(shard, entry.b_offset, entry.b_shape).float() * entry.scaling
                b[row : row + outputs, first:last] = scaled
                blocks.append((first, last, row, row + outputs))
                first = last
            row += outputs
        return _LoraPair(a.to(self._device), b.to(self._device), torch.tensor(blocks))


def _tensor(shard: AdapterShard, offset: int, shape: tuple[int, int]) -> Tensor:
    """Return a copy of a tensor in the shard's buffer, which may be read-only and unaligned."""
    tensor = torch.empty(shape, dtype=_DTYPES[shard.dtype])
    target = tensor.view(torch.uint8).numpy().reshape(-1)
    target[:] = shard.data[offset : offset + target.size]
    return tensor
