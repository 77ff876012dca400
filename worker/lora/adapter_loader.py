"""Makes the weights of an adapter from a rank's shards, while steps run.

The packed path makes one copy to the device for the whole shard. A shard of LoRAs of linear modules
alone is laid out like `AdapterWeights` already; what is left is to widen or narrow the whole
buffer, to scale each B in place and to make views: a millisecond or two beside the steps that run,
where building module by module takes ten.

The general path builds adapters with DoRA, vocabulary or a classification head, and sums. Owns the
fusing of modules and the weighted sum of several adapters, which is their LoRAs side by side: A
stacked, and one block of B for all of a module. Reads the base model's checkpoint where DoRA or a
table of the vocabulary needs it; uses no other rank.

Shapes: R lora_rank of a fused linear's modules and all sources together, K its inputs and N its
outputs on this rank, V vocabulary entries of this rank, H hidden.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.gpu.async_copy import send_in_pieces
from kernels.linear import Prepare, prepare_linear
from kernels.lora import join_blocks
from kernels.native.huge_pages import huge_empty
from worker.errors import UnusableAdapter
from worker.linears import all_products
from worker.lora.adapter_weights import (
    AdapterEmbedding,
    AdapterHead,
    AdapterWeights,
    LoraLayerWeights,
)
from worker.lora.shard import (
    EMBEDDING,
    HEAD,
    AdapterShard,
    LoraEntry,
    adapted_slices,
    num_outputs,
)
from worker.lora.source import DTYPES, LoraSource
from worker.weights.partition import Partition

if TYPE_CHECKING:
    from worker.lora.base_weights import BaseWeights, OpenWeights


def build_adapter_weights(
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
) -> AdapterWeights:
    """Return the weights of an adapter, which may be a weighted sum.

    Args:
        adapter: its digest, or several with weights.
        weights: of the sum; a single weight of 1 is that adapter itself.
        shards: one for each weight, all of the same rank as `part`.
        part: the slices of this rank.
        num_layers: of the model.
        dtype: of A and B.
        device: of all tensors.
        prepare: packs an adapter's own head.
        base: may be None if no shard has DoRA or tables.

    Raises:
        UnusableAdapter: if an adapter cannot be summed, a number is not finite, or the base model's
            weights are needed and cannot be read any more.
    """
    assert len(shards) == len(weights) > 0, f"{len(shards)} shards for {len(weights)} weights"
    for shard in shards:
        assert (shard.rank, shard.tp) == (part.rank, part.tp), (
            f"shard {shard.rank} of {shard.tp} came to rank {part.rank} of {part.tp}"
        )

    if tuple(weights) == (1.0,) and shards[0].is_packed:
        return packed_weights(shards[0], part, num_layers=num_layers, dtype=dtype, device=device)

    def build(opened: "OpenWeights | None") -> AdapterWeights:
        sources = [LoraSource(s, w, part, opened) for s, w in zip(shards, weights, strict=True)]
        if tuple(weights) == (1.0,):
            tables = sources[0].own_tables()
        else:
            tables = {}
            for source in sources:
                source.check_summable()
        return _Builder(sources, tables, part, dtype, device, prepare).build(adapter, num_layers)

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
    """Makes the weights of one adapter, module by module."""

    def __init__(
        self,
        sources: Sequence[LoraSource],
        tables: Mapping[str, Tensor],
        part: Partition,
        dtype: torch.dtype,
        device: torch.device,
        prepare: Prepare,
    ) -> None:
        self._sources = sources
        self._tables = tables
        self._part = part
        self._dtype = dtype
        self._device = device
        self._prepare = prepare

    def build(self, adapter: str, num_layers: int) -> AdapterWeights:
        layers = tuple(
            tuple(
                self._fused(layer, [linear.name for linear in modules])
                for modules in all_products(self._part.linears)
            )
            for layer in range(num_layers)
        )
        score = self._sources[0].score_head()  # what has one is no part of a sum
        return AdapterWeights(
            adapter,
            layers,
            self._embedding(),
            self._head(),
            None if score is None else score.to(self._device),
        )

    def _fused(self, layer: int, modules: Sequence[str]) -> LoraLayerWeights | None:
        """Build the LoRA of one fused linear from those of its modules that have one."""
        widths = [num_outputs(self._part, module) for module in modules]
        gain, shift = torch.ones(sum(widths)), torch.zeros(sum(widths))
        stacked, blocks = [], []
        row = 0
        for module, width in zip(modules, widths, strict=True):
            here = slice(row, row + width)
            ab = self._module(layer, module, gain[here], shift[here])
            if ab is not None:
                stacked.append(ab[0])
                blocks.append((row, ab[1]))
            row += width
        if not blocks:
            return None
        b, index = join_blocks(blocks)
        return LoraLayerWeights(
            torch.cat(stacked).to(self._device),
            b.to(self._device),
            index,
            gain.to(self._device) if bool((gain != 1).any()) else None,
            shift.to(self._device) if bool(shift.any()) else None,
        )

    def _module(
        self, layer: int, module: str, gain: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return (A [R, K], B [N, R]) of one module, None if no source adapts it.

        Fills the module's gain [N] and shift [N], if its only source has DoRA.
        """
        adapted = [(s, entry) for s in self._sources if (entry := s.entry(layer, module))]
        if not adapted:
            return None
        stacked, side_by_side = [], []
        for source, entry in adapted:
            a, b = source.matrices(entry)
            if entry.magnitude_offset is not None:
                gain[:], shift[:] = source.gain_and_shift(entry, b)
            stacked.append(a.to(self._dtype))
            side_by_side.append((gain.unsqueeze(1) * b).to(self._dtype))
        return torch.cat(stacked), torch.cat(side_by_side, dim=1)

    def _embedding(self) -> AdapterEmbedding | None:
        """Build what the adapter does to the embedding, None for nothing."""
        table = self._tables.get(EMBEDDING)
        if table is not None:
            table = table.to(self._device)
        gain, shift = torch.ones(self._part.hidden), torch.zeros(self._part.hidden)
        ab = self._module(0, EMBEDDING, gain, shift)
        if ab is None:
            return None if table is None else AdapterEmbedding(table, None, None, None)
        a, b = ab
        return AdapterEmbedding(
            table,
            a.T.contiguous().to(self._device),
            b.to(self._device),
            gain.to(self._device) if bool((gain != 1).any()) else None,
        )

    def _head(self) -> AdapterHead | None:
        """Build what the adapter does to the head, None for nothing."""
        table, lora = self._tables.get(HEAD), self._fused(0, (HEAD,))
        if table is None and lora is None:
            return None
        weight = None if table is None else self._prepare(table.to(self._device), None)
        return AdapterHead(weight, lora)


def packed_weights(
    shard: AdapterShard,
    part: Partition,
    *,
    num_layers: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AdapterWeights:
    """Return the weights of a packed shard; all their tensors share one storage.

    Raises:
        UnusableAdapter: if a number is not finite in float32, times its scaling.
    """
    assert shard.is_packed, f"adapter {shard.digest} is not packed"
    data = _scaled(shard, dtype, device)
    indices: dict[tuple[tuple[int, ...], ...], Tensor] = {}  # layers mostly have the same one
    modules = [[linear.name for linear in fused] for fused in all_products(part.linears)]
    layers: list[list[LoraLayerWeights | None]] = [[None] * len(modules) for _ in range(num_layers)]
    linear_of = {name: index for index, names in enumerate(modules) for name in names}
    by_linear = groupby(shard.entries, lambda entry: (entry.layer, linear_of[entry.module]))
    item = DTYPES[shard.dtype].itemsize
    for (layer, linear), entries in by_linear:
        layers[layer][linear] = _fused(list(entries), modules[linear], part, data, item, indices)
    return AdapterWeights(shard.digest, tuple(map(tuple, layers)), None, None)


def _scaled(shard: AdapterShard, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the shard's buffer on the device, every B times its scaling."""
    stored = DTYPES[shard.dtype]
    # A copy: theirs is read-only, and no GPU reads it without a copy on its way.
    is_gpu = device.type == "cuda"
    num_items = len(shard.data) // stored.itemsize
    if is_gpu:
        raw = torch.empty(num_items, dtype=stored, pin_memory=True)
    else:
        raw = _empty_on_cpu(num_items, stored)
    raw.view(torch.uint8).numpy()[:] = shard.data
    there = send_in_pieces(raw, device) if is_gpu else raw
    data = _converted(there, torch.promote_types(stored, dtype))
    all_b = data[shard.entries[0].b_offset // stored.itemsize :]
    scalings = {entry.scaling for entry in shard.entries}
    if len(scalings) == 1:
        all_b.mul_(shard.entries[0].scaling)
    else:
        for entry in shard.entries:
            first = entry.b_offset // stored.itemsize
            data[first : first + entry.b_shape[0] * entry.lora_rank].mul_(entry.scaling)
    if not bool(all_b.isfinite().all()):  # A came checked
        raise UnusableAdapter(
            f"adapter {shard.digest}: B times its scaling is over what {data.dtype} can hold"
        )
    return _converted(data, dtype)


def _converted(data: Tensor, dtype: torch.dtype) -> Tensor:
    if data.dtype == dtype or data.device.type != "cpu":
        return data.to(dtype)
    return _empty_on_cpu(len(data), dtype).copy_(data)


def _empty_on_cpu(num_items: int, dtype: torch.dtype) -> Tensor:
    """Return memory that steps will read from end to end."""
    return huge_empty(num_items * dtype.itemsize, is_exact=True).view(dtype)


def _fused(
    entries: Sequence[LoraEntry],
    modules: Sequence[str],
    part: Partition,
    data: Tensor,
    item: int,
    indices: dict[tuple[tuple[int, ...], ...], Tensor],
) -> LoraLayerWeights:
    """Return the LoRA of one fused linear: views of `data`, whose elements were `item` bytes."""
    first_a, first_b = entries[0].a_offset // item, entries[0].b_offset // item
    row_by_module, row = {}, 0
    for module in modules:
        row_by_module[module] = row
        row += num_outputs(part, module)
    blocks = []
    rank = end_b = 0
    for entry in entries:
        assert entry.a_offset // item == first_a + rank * entry.a_shape[1], "A's are not stacked"
        start, width = row_by_module[entry.module], entry.b_shape[0]
        first = entry.b_offset // item
        end_b = first + width * entry.lora_rank
        end = rank + entry.lora_rank
        blocks.append((rank, end, start, start + width, first - first_b))
        rank = end
    key = tuple(blocks)
    if key not in indices:
        indices[key] = torch.tensor(blocks)
    num_inputs = entries[0].a_shape[1]
    _, columns = adapted_slices(part, modules[0])
    assert num_inputs == len(columns), f"A was cut to {num_inputs} inputs of {columns}"
    a = data[first_a : first_a + rank * num_inputs].view(rank, num_inputs)
    return LoraLayerWeights(a, data[first_b:end_b], indices[key], None, None)
