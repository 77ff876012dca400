"""Cuts an adapter into what each tensor-parallel rank holds of it.

Column-parallel modules and the head: A whole, B's rows cut. Row-parallel ones and the embedding:
A's columns cut, B whole; but row-parallel ones are whole where ranks' sums are exact. Tables: the
rows of the rank's vocabulary. A classification head: whole.
The layout of a shard's buffer is decided here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import cast

import numpy as np
import numpy.typing as npt

from cluster.adapters.adapter import ITEM_BYTES, Adapter, Bits, LoraModule
from worker.lora.shard import (
    EMBEDDING,
    VOCABULARY_MODULES,
    AdapterShard,
    LoraEntry,
    ScoreEntry,
    TableEntry,
    adapted_slices,
    is_summed,
)
from worker.spans import Span
from worker.weights.partition import Partition, partitions

ALIGNMENT = 64  # bytes; every tensor starts on a cache line, but for stacked A's


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The ranks that adapters are cut for; sizes in bytes."""

    tp: int
    has_exact_sums: bool = False
    adapter_item_bytes: int  # of an element of A and B on the device
    model_item_bytes: int  # of an element of the base model's weights
    adapter_bytes: int | None = None  # for all adapters of a rank together; None: no limit


class _Buffer:
    """Collects tensors and gives each its place in the shard's buffer."""

    def __init__(self) -> None:
        self._tensors: list[tuple[int, Bits]] = []
        self._size = 0

    def place(self, tensor: Bits, *, follows: bool = False) -> int:
        """Return the offset that a tensor will have, in bytes; right behind the one before it?"""
        offset = self._size if follows else -(-self._size // ALIGNMENT) * ALIGNMENT
        self._size = offset + tensor.nbytes
        self._tensors.append((offset, tensor))
        return offset

    def packed(self, item_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the buffer: each tensor row-major at its offset; gaps are zero."""
        data = np.zeros(self._size, np.uint8)
        for offset, tensor in self._tensors:
            place = data[offset : offset + tensor.nbytes].view(f"u{item_bytes}")
            place.reshape(tensor.shape)[...] = tensor
        return data


def cut(adapter: Adapter, part: Partition) -> AdapterShard:
    """Return the slice of an adapter that the rank of `part` holds, in a buffer of its own."""
    buffer = _Buffer()
    entries = _place_modules(buffer, [_slice(module, part) for module in adapter.modules], part)
    tables = _place_tables(buffer, adapter, part)
    score = None
    if adapter.score is not None:
        num_labels, hidden = adapter.score.weight.shape
        score = ScoreEntry(buffer.place(adapter.score.weight), (num_labels, hidden))
    return AdapterShard(
        digest=adapter.digest,
        rank=part.rank,
        tp=part.tp,
        dtype=adapter.dtype,
        entries=entries,
        data=buffer.packed(ITEM_BYTES[adapter.dtype]),
        tables=tables,
        is_packed=_is_packed(adapter),
        score=score,
    )


def _is_packed(adapter: Adapter) -> bool:
    has_more = adapter.tables or adapter.score is not None
    return not has_more and all(
        one.magnitude is None and one.module not in VOCABULARY_MODULES for one in adapter.modules
    )


def _slice(module: LoraModule, part: Partition) -> LoraModule:
    """Return what the rank of `part` holds of a module."""
    rows, columns = adapted_slices(part, module.module)
    a, b, magnitude = module.a, module.b, module.magnitude
    if not is_summed(part, module.module):
        b = _rows(b, rows)
        magnitude = None if magnitude is None else _rows(magnitude, rows)
    elif magnitude is None:  # DoRA's norms need all of A
        a = a[:, columns.start : columns.stop]
    return replace(module, a=a, b=b, magnitude=magnitude)


def _rows(tensor: Bits, spans: Sequence[Span]) -> Bits:
    """Return the rows of all spans one after the other; those of one are not copied."""
    parts = [tensor[span.start : span.stop] for span in spans]
    return parts[0] if len(parts) == 1 else cast(Bits, np.concatenate(parts))


def _place_modules(
    buffer: _Buffer, modules: list[LoraModule], part: Partition
) -> tuple[LoraEntry, ...]:
    """Place first all A's, those of a fused linear stacked, then all B's, then the rest."""
    fused: dict[str, str] = {linear.name: linear.product for linear in part.linears}
    a_offsets: list[int] = []
    for _, linear in groupby(modules, lambda one: (one.layer, fused.get(one.module, one.module))):
        a_offsets += [buffer.place(one.a, follows=i > 0) for i, one in enumerate(linear)]
    b_offsets = [buffer.place(one.b.T) for one in modules]
    return tuple(
        LoraEntry(
            layer=one.layer,
            module=one.module,
            lora_rank=one.lora_rank,
            scaling=one.scaling,
            a_offset=a_offset,
            a_shape=(one.a.shape[0], one.a.shape[1]),
            b_offset=b_offset,
            b_shape=(one.b.shape[0], one.b.shape[1]),
            magnitude_offset=None if one.magnitude is None else buffer.place(one.magnitude),
        )
        for one, a_offset, b_offset in zip(modules, a_offsets, b_offsets, strict=True)
    )


def _place_tables(buffer: _Buffer, adapter: Adapter, part: Partition) -> tuple[TableEntry, ...]:
    needs_all = {module.module for module in adapter.modules if module.magnitude is not None}
    entries = []
    placed: dict[tuple[int, int], int] = {}  # one table that serves both modules is sent once
    for table in adapter.tables:
        weight = table.weight
        if not (table.module == EMBEDDING and EMBEDDING in needs_all):
            weight = weight[part.vocab.start : part.vocab.stop]
        key = (id(table.weight), len(weight))
        if key not in placed:
            placed[key] = buffer.place(weight)
        entries.append(TableEntry(table.module, placed[key], (weight.shape[0], weight.shape[1])))
    return tuple(entries)


def cut_all(adapter: Adapter, tp: int, *, has_exact_sums: bool = False) -> tuple[AdapterShard, ...]:
    """Return the shards of all `tp` ranks, in rank order."""
    parts = partitions(adapter.model, tp, has_exact_sums=has_exact_sums)
    return tuple(cut(adapter, part) for part in parts)
