"""Makes the form of an adapter out of a rank's shards, in the background of running steps.

Owns the fusing of modules and the weighted sum of several adapters, which is their LoRAs side by
side: A stacked, and one block of B for all of a module. Reads the base model's checkpoint where
DoRA or a table asks for it, and asks no other rank. Knows nothing of slots or batches.

Shapes: R lora_rank of a fused linear's modules and all parts together, K its inputs and N its
outputs on this rank, V vocabulary entries of this rank, H hidden.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.linear import Prepare, prepare_linear
from kernels.lora import join_blocks
from worker.lora.adapter_weights import AdapterForm, EmbeddingForm, HeadForm, LoraPair
from worker.lora.packed import plain_form
from worker.lora.shard import (
    EMBEDDING,
    FUSED_MODULES,
    HEAD,
    AdapterShard,
    UnusableAdapter,
    adapted_slices,
)
from worker.lora.source import AdapterPart
from worker.weights.partition import Partition

if TYPE_CHECKING:
    from worker.lora.base_weights import BaseWeights, OpenWeights


def build_form(
    adapter: str,
    weights: Sequence[float],
    shards: Sequence[AdapterShard],
    part: Partition,
    *,
    num_layers: int,
    dtype: torch.dtype,
    device: torch.device,
    prepare: Prepare = prepare_linear,
    base: "BaseWeights | None",
) -> AdapterForm:
    """Return the form of an adapter, which may be a weighted sum.

    Args:
        adapter: what the form is called.
        weights: of its parts; a single part of weight 1 is that adapter itself.
        shards: of its parts in the same order, all of the same rank as `part`.
        part: what this rank holds.
        num_layers: of the model.
        dtype: of A and B.
        device: of all tensors of the form.
        prepare: makes an own head ready.
        base: may be None if no shard has DoRA or tables.

    Raises:
        UnusableAdapter: if a part cannot be summed, a number is not finite, or the base model's
            weights are needed and cannot be read any more.
    """
    assert len(shards) == len(weights) > 0, f"{len(shards)} shards for {len(weights)} weights"
    for shard in shards:
        assert (shard.rank, shard.tp) == (part.rank, part.tp), (
            f"shard {shard.rank} of {shard.tp} came to rank {part.rank} of {part.tp}"
        )

    if tuple(weights) == (1.0,) and shards[0].is_plain:
        return plain_form(shards[0], part, num_layers=num_layers, dtype=dtype, device=device)

    def build(opened: "OpenWeights | None") -> AdapterForm:
        parts = [AdapterPart(s, w, part, opened) for s, w in zip(shards, weights, strict=True)]
        if tuple(weights) == (1.0,):
            tables = parts[0].own_tables()
        else:
            tables = {}
            for one in parts:
                one.check_summable()
        return _Builder(parts, tables, part, dtype, device, prepare).form(adapter, num_layers)

    if not any(_needs_base(shard) for shard in shards):
        return build(None)
    assert base is not None, "DoRA and tables need the base model's weights"
    try:
        with base.opened() as opened:
            return build(opened)
    except (OSError, ValueError) as error:
        raise UnusableAdapter(f"the base model's weights cannot be read again: {error}") from error


def _needs_base(shard: AdapterShard) -> bool:
    return bool(shard.tables) or any(e.magnitude_offset is not None for e in shard.entries)


class _Builder:
    """Makes the pieces of one form."""

    def __init__(
        self,
        parts: Sequence[AdapterPart],
        tables: Mapping[str, Tensor],
        part: Partition,
        dtype: torch.dtype,
        device: torch.device,
        prepare: Prepare,
    ) -> None:
        self._parts = parts
        self._tables = tables
        self._part = part
        self._dtype = dtype
        self._device = device
        self._prepare = prepare

    def form(self, adapter: str, num_layers: int) -> AdapterForm:
        pairs = tuple(
            tuple(self._pair(layer, modules) for modules in FUSED_MODULES)
            for layer in range(num_layers)
        )
        return AdapterForm(adapter, pairs, self._embedding(), self._head())

    def _pair(self, layer: int, modules: Sequence[str]) -> LoraPair | None:
        """Build the pair of one fused linear from those of its modules that have a LoRA."""
        widths = [len(adapted_slices(self._part, module)[0]) for module in modules]
        gain, shift = torch.ones(sum(widths)), torch.zeros(sum(widths))
        stacked, blocks = [], []
        row = 0
        for module, width in zip(modules, widths, strict=True):
            here = slice(row, row + width)
            found = self._module(layer, module, gain[here], shift[here])
            if found is not None:
                stacked.append(found[0])
                blocks.append((row, found[1]))
            row += width
        if not blocks:
            return None
        b, index = join_blocks(blocks)
        return LoraPair(
            torch.cat(stacked).to(self._device),
            b.to(self._device),
            index,
            gain.to(self._device) if bool((gain != 1).any()) else None,
            shift.to(self._device) if bool(shift.any()) else None,
        )

    def _module(
        self, layer: int, module: str, gain: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return (A [R, K], B [N, R]) of one module, None if no part adapts it.

        Fills the module's gain [N] and shift [N], if its only part has DoRA.
        """
        found = [(p, entry) for p in self._parts if (entry := p.entry(layer, module)) is not None]
        if not found:
            return None
        stacked, side_by_side = [], []
        for one, entry in found:
            a, b = one.matrices(entry)
            if entry.magnitude_offset is not None:
                gain[:], shift[:] = one.gain_and_shift(entry, b)
            stacked.append(a.to(self._dtype))
            side_by_side.append((gain.unsqueeze(1) * b).to(self._dtype))
        return torch.cat(stacked), torch.cat(side_by_side, dim=1)

    def _embedding(self) -> EmbeddingForm | None:
        """Build what the adapter does to the embedding, None for nothing."""
        table = self._tables.get(EMBEDDING)
        if table is not None:
            table = table.to(self._device)
        gain, shift = torch.ones(self._part.hidden), torch.zeros(self._part.hidden)
        found = self._module(0, EMBEDDING, gain, shift)
        if found is None:
            return None if table is None else EmbeddingForm(table, None, None, None)
        a, b = found
        return EmbeddingForm(
            table,
            a.T.contiguous().to(self._device),
            b.to(self._device),
            gain.to(self._device) if bool((gain != 1).any()) else None,
        )

    def _head(self) -> HeadForm | None:
        """Build what the adapter does to the head, None for nothing."""
        table, pair = self._tables.get(HEAD), self._pair(0, (HEAD,))
        if table is None and pair is None:
            return None
        weight = None if table is None else self._prepare(table.to(self._device), None)
        return HeadForm(weight, pair)
