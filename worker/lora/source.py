"""The LoRA source: one adapter of those that are loaded as a sum, its shard read as tensors.

Owns reading the shard's buffer, what goes into B (scaling, weight, DoRA's gain) and whether a table
is the adapter's own or equals the base model's. Every tensor is on the host.

Shapes: R lora_rank of one module, K its inputs and N its outputs on this rank, V vocabulary entries
of this rank, H hidden.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from worker.errors import UnusableAdapter
from worker.lora.dora import embedding_gain, linear_gain
from worker.lora.shard import (
    EMBEDDING,
    HEAD,
    VOCABULARY_MODULES,
    AdapterShard,
    LoraEntry,
    adapted_slices,
    is_summed,
    num_outputs,
)
from worker.spans import Span
from worker.weights.partition import Partition

if TYPE_CHECKING:
    from worker.lora.base_weights import OpenWeights

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class LoraSource:
    """An adapter with its weight in a sum; a single adapter has weight 1."""

    def __init__(
        self, shard: AdapterShard, weight: float, part: Partition, opened: "OpenWeights | None"
    ) -> None:
        """Take a shard; without `opened`, one that has neither DoRA nor tables."""
        self._shard = shard
        self._weight = weight
        self._part = part
        self._opened = opened
        self._entries = {(entry.layer, entry.module): entry for entry in shard.entries}
        self._tables = {entry.module: entry for entry in shard.tables}
        self._own_tables: dict[str, Tensor] | None = None

    def check_summable(self) -> None:
        """Refuse what has no weighted sum.

        Raises:
            UnusableAdapter: it has DoRA, which is no term that is added, or a table or a
                classification head of its own, which takes the place of the base model's.
        """
        for entry in self._shard.entries:
            if entry.magnitude_offset is not None:
                raise self._unusable(
                    f"has DoRA on {entry.module} (layer {entry.layer}) and cannot be part of a "
                    "weighted sum; ask for it alone, with weight 1"
                )
        for module in self.own_tables():
            raise self._unusable(
                f"brings another {module} than the base model's and cannot be part of a "
                "weighted sum; ask for it alone, with weight 1"
            )
        if self._shard.score is not None:
            raise self._unusable(
                "brings a classification head and cannot be part of a weighted sum; ask for it "
                "alone, with weight 1"
            )

    def entry(self, layer: int, module: str) -> LoraEntry | None:
        """Return the LoRA of a module in a layer, None if there is none."""
        return self._entries.get((layer, module))

    def matrices(self, entry: LoraEntry) -> tuple[Tensor, Tensor]:
        """Return (A [R, K] as stored, B [N, R] float32 times scaling and weight).

        Raises:
            UnusableAdapter: if B is too large to be multiplied by them.
        """
        _, columns = adapted_slices(self._part, entry.module)
        a = self._whole_a(entry)
        if entry.magnitude_offset is not None and is_summed(self._part, entry.module):
            a = a[:, columns.start : columns.stop]
        assert a.shape == (entry.lora_rank, len(columns)), f"A of {entry}"
        outputs = num_outputs(self._part, entry.module)
        assert entry.b_shape == (outputs, entry.lora_rank), f"B of {entry}"
        b = self._b(entry).float() * (entry.scaling * self._weight)
        if not bool(b.isfinite().all()):
            raise self._unusable(
                f"on {entry.module} (layer {entry.layer}): B times scaling {entry.scaling:g} times "
                f"weight {self._weight:g} is over what float32 can hold"
            )
        return a, b

    def gain_and_shift(self, entry: LoraEntry, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return DoRA's gain [N] of an entry with a magnitude, and what spares the bias [N].

        Raises:
            UnusableAdapter: if the gain is not finite.
        """
        assert entry.magnitude_offset is not None, f"no magnitude: {entry}"
        layer, module = entry.layer, entry.module
        magnitude = self._tensor(entry.magnitude_offset, (entry.b_shape[0],)).float()
        rows, _ = adapted_slices(self._part, module)

        uses_base_head = module == HEAD and HEAD not in self.own_tables()

        def read(span: Span) -> Tensor:
            if uses_base_head:
                return self._base().head_rows(span)
            if module in VOCABULARY_MODULES:
                return self._vocabulary_rows(module, span)
            return self._base().rows(layer, module, span)

        a = self._whole_a(entry).float()
        if module == EMBEDDING:
            gain = embedding_gain(read, a, b, magnitude)
        else:
            sizes = [len(span) for span in rows]
            parts = zip(rows, torch.split(b, sizes), torch.split(magnitude, sizes), strict=True)
            gain = torch.cat([linear_gain(read, span, a, *part) for span, *part in parts])
        if not bool(gain.isfinite().all()):
            raise UnusableAdapter(
                f"DoRA of {module} (layer {layer}): magnitude / |W + BA| is not finite; "
                "does a row of the adapted weight cancel out?"
            )
        bias = None if module in VOCABULARY_MODULES else self._base().bias(layer, module)
        return gain, torch.zeros(len(gain)) if bias is None else bias.float() * (1 - gain)

    def own_tables(self) -> dict[str, Tensor]:
        """Return this rank's rows [V, H] of each table that differs from the base model's.

        PEFT saves the base model's table with every LoRA of the vocabulary; it is not kept twice.
        """
        if self._own_tables is not None:
            return self._own_tables
        own = {}
        for module in self._tables:
            rows = self._vocabulary_rows(module, self._part.vocab)
            if not torch.equal(rows, self._base().vocabulary(module, self._part.vocab)):
                own[module] = rows
        self._own_tables = own
        return own

    def score_head(self) -> Tensor | None:
        """Return the adapter's classification head [labels, H] in float32, if it has one."""
        entry = self._shard.score
        return None if entry is None else self._tensor(entry.offset, entry.shape).float()

    def _vocabulary_rows(self, module: str, span: Span) -> Tensor:
        """Return rows of the weight beneath a LoRA of the vocabulary, counted in the whole one."""
        table = self._tables.get(module)
        if table is None:
            return self._base().vocabulary(module, span)
        offset, width = table.offset, table.shape[1]
        first = span.start - self._first_row(module)
        assert first >= 0 and first + len(span) <= table.shape[0], f"{span} of {table}"
        item = DTYPES[self._shard.dtype].itemsize
        rows = self._tensor(offset + first * width * item, (len(span), width))
        return rows.to(self._base().dtype)

    def _first_row(self, module: str) -> int:
        """Return where a table that came with the adapter begins."""
        entry = self._entries.get((0, module))
        is_whole = module == EMBEDDING and entry is not None and entry.magnitude_offset is not None
        return 0 if is_whole else self._part.vocab.start

    def _whole_a(self, entry: LoraEntry) -> Tensor:
        return self._tensor(entry.a_offset, entry.a_shape)

    def _b(self, entry: LoraEntry) -> Tensor:
        return self._tensor(entry.b_offset, entry.b_shape[::-1]).T

    def _base(self) -> "OpenWeights":
        assert self._opened is not None, "the base model's weights are not open"
        return self._opened

    def _tensor(self, offset: int, shape: tuple[int, ...]) -> Tensor:
        """Return a copy of a tensor in the shard's buffer, which may be read-only and unaligned."""
        tensor = torch.empty(shape, dtype=DTYPES[self._shard.dtype])
        target = tensor.view(torch.uint8).numpy().reshape(-1)
        target[:] = self._shard.data[offset : offset + target.size]
        return tensor

    def _unusable(self, reason: str) -> UnusableAdapter:
        return UnusableAdapter(f"adapter {self._shard.digest} {reason}")
